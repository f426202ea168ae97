"""One pass over the texts: sums batches for its tiles, and ends with what their measures are computed from."""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from aligners.datamodules.layers import LayerBatch
from aligners.datamodules.tokens.splits import Split
from aligners.models.model import FrozenModel
from aligners.similarity.algebra.moments import Device, constant_features
from aligners.similarity.controls import Draw
from aligners.similarity.functional.attention import fold, word_pairs
from aligners.similarity.functional.canonical_correlations import Whitenings
from aligners.similarity.passes.pass_plan import Pass, Settings, Span, Tile
from aligners.similarity.passes.ranks import ranks, summed, this_rank
from aligners.similarity.passes.streams import FAR_VALUES, BatchRows, ModelRows, Stream
from aligners.similarity.passes.sums import Given, SpanSums, TileSums

# whether a model's rows are X's or Y's, and which of its layers
Side = tuple[str, Span]


class FeatureScales:
    """Mean and standard deviation of each feature, over batches and ranks, by which features are standardised.

    Args:
        layers: L.
        width: d.
        device: where the rows are.
    """

    def __init__(self, layers: int, width: int, device: Device = None) -> None:
        shape = (3, layers, width)  # of 1, x and x²
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)

    def update(self, states: Tensor) -> None:
        """Add rows: (L, N, d)."""
        states = states.double()
        n, sums, squares = self._sums
        n += states.shape[1]
        sums += states.sum(1)
        squared = states.square()
        squares += squared.sum(1)

    def compute(self) -> tuple[Tensor, Tensor]:
        """Means and deviations, (L, d) each; the deviation of a constant feature is given as 1."""
        n, sums, squares = summed(self._sums)
        mean = sums / n
        variance = squares / n - mean.square()
        constant = constant_features(variance, mean)
        variance = variance.where(~constant, 1)
        return mean, variance.sqrt()


class PassRun:
    """Sums the batches of one pass.

    Args:
        this: the pass.
        settings: settings of the comparison.
    """

    def __init__(self, this: Pass, settings: Settings) -> None:
        self.this = this
        self.settings = settings
        self.layers = settings.layers_read(this)
        device = settings.device
        self.rows = torch.zeros((), dtype=torch.float64, device=device)
        self.streams: dict[str, StreamSums] = {}
        for stream in settings.streams:
            sums = StreamSums(stream, this, settings)
            self.streams[stream.name] = sums
        self.twins: dict[int, FrozenModel] = {}
        self.scales: dict[int, FeatureScales] = {}
        for m in this.models:
            if "untrained" in self.streams:
                self.twins[m] = self._twin(m)
            if "standardised" in self.streams:
                layers = len(self.layers[m])
                width = settings.shapes[m].width
                self.scales[m] = FeatureScales(layers, width, device)

    def _twin(self, m: int) -> FrozenModel:
        """A model of the same architecture with random weights."""
        model = self.settings.reader.models[m]
        seed = self.settings.seed + m
        return model.untrained(seed)

    def add(self, batch: LayerBatch, split: Split, group: int) -> None:
        """Add one batch, all of whose texts belong to one group."""
        if split == "test":
            self.rows += len(batch.text)
        else:
            for m, scales in self.scales.items():
                scales.update(batch.states[m])
        observed = self._folded(batch, batch.states, batch.attention)
        for sums in self.streams.values():
            stream = sums.stream
            if stream.split != split or not sums.tiles:
                continue
            rows = self._rows_of(stream, batch, observed)
            sums.update(rows, group)

    def end_fit(self) -> None:
        """Take mean and deviation of every feature over the fitting texts of all ranks."""
        self.scaling = {}
        for m, scales in self.scales.items():
            self.scaling[m] = scales.compute()

    def end(self) -> None:
        """Add up all ranks, which get the tiles in turn."""
        self.rows = summed(self.rows)
        self.twins = {}
        for sums in self.streams.values():
            sums.end()

    def mine(self) -> list[Tile]:
        """The tiles that this rank measures."""
        first = this_rank()
        mine = self.this.tiles[first :: ranks()]
        return list(mine)

    def take(self, tile: Tile) -> dict[str, TileSums]:
        """The sums of a tile by stream, once the pass has ended; they are given away."""
        taken = {}
        for name, sums in self.streams.items():
            if tile in sums.tiles:
                taken[name] = sums.tiles.pop(tile)
        return taken

    def whitenings(self) -> Iterator[tuple[Span, Whitenings]]:
        """The spans of the pass with what is decomposed of their layers, once the pass has ended."""
        observed = self.streams["value"]
        for (_, span), sums in observed.sides.items():
            if "moments" in sums.moments:
                yield span, sums.white

    # ------------------------------------------------------------------ the rows of each stream

    def _rows_of(
        self, stream: Stream, batch: LayerBatch, observed: BatchRows
    ) -> BatchRows:
        """The rows of a batch in one of the streams."""
        if stream.order is not None:
            return observed.reordered(stream.order, self.settings.seed)
        if stream.name == "untrained":
            return self._untrained(batch)
        if stream.name in FAR_VALUES.values():
            beside = batch.counterpart
            return self._folded(beside, beside.states, None)
        if stream.name == "standardised":
            rows = {}
            for m in self.this.models:
                rows[m] = self._standardised(batch, m)
            return observed._replace(x=rows, y=rows)
        return observed

    def _untrained(self, batch: LayerBatch) -> BatchRows:
        """The rows that the untrained twins have of the same texts."""
        states, attention = {}, {}
        reader = self.settings.reader
        for m, twin in self.twins.items():
            layers = self.layers[m]
            read = reader.read_model(twin, batch, m, layers)
            states[m], attention[m] = read
        return self._folded(batch, states, attention)

    def _standardised(self, batch: LayerBatch, m: int) -> ModelRows:
        """The states of a model by mean and deviation of each feature on the fitting texts."""
        mean, deviation = self.scaling[m]
        states = batch.states[m].double()
        states = states - mean[:, None]
        return ModelRows(states / deviation[:, None])

    def _folded(
        self,
        batch: LayerBatch,
        states: Mapping[int, Tensor] | Sequence[Tensor],
        attention: Mapping[int, Sequence[Tensor]] | Sequence[Sequence[Tensor]] | None,
    ) -> BatchRows:
        """Rows of each model, with attention, if it is wanted, between the words that all models have."""
        words = batch.text[:0]
        if self.settings.attention and attention is not None:
            counts = cast(Tensor, batch.texts.word_count)
            places = cast(tuple[Tensor, ...], batch.texts.words)
            some = counts > 0
            words = counts[some]
        rows = {}
        for m in self.this.models:
            heads = None
            if attention is not None and len(words):
                blocks = [block[some] for block in attention[m]]
                word = places[m][some]
                heads = fold(blocks, word, words)
            rows[m] = ModelRows(states[m], heads)
        text, token = batch.text, batch.token
        return BatchRows(text, token, words, x=rows, y=rows)


class StreamSums:
    """What a pass keeps of one stream.

    Args:
        stream: which.
        this: the pass.
        settings: settings of the comparison.
    """

    def __init__(self, stream: Stream, this: Pass, settings: Settings) -> None:
        self.stream = stream
        self.this = this
        # the same rows for every pair of models, whatever else is in this pass
        models = settings.reader.models
        self.ahead = not any(model.causal for model in models)
        seed, device = settings.seed, settings.device
        self.draws: dict[int, Draw] = {}
        for budget in stream.budgets:
            self.draws[budget] = Draw(budget, seed, device)

        self.sides: dict[Side, SpanSums] = {}
        self.tiles: dict[Tile, TileSums] = {}
        for tile in this.tiles:
            if stream.covers(tile.pair):
                self._begin(tile, settings)

    def _begin(self, tile: Tile, settings: Settings) -> None:
        """Begin the sums of a tile, and of its sides where no other tile has them."""
        stream = self.stream
        for side in self._sides(tile):
            if side not in self.sides:
                _, span = side
                self.sides[side] = SpanSums(stream, span, settings)
        x, y = self._sides(tile)
        both = self.sides[x], self.sides[y]
        self.tiles[tile] = TileSums(stream, tile, both, settings)

    def update(self, rows: BatchRows, group: int) -> None:
        """Add a batch."""
        admitted = {}
        for budget, draw in self.draws.items():
            admitted[budget] = draw.admit(rows.text, rows.token)
        given_of: dict[Side, Given] = {}
        for side, sums in self.sides.items():
            given = self._given(rows, side)
            given_of[side] = given
            sums.update(given, group, admitted)
        for tile, sums_of_both in self.tiles.items():
            x, y = self._sides(tile)
            sums_of_both.update(given_of[x], given_of[y], group)

    def end(self) -> None:
        """Add up all ranks."""
        for draw in self.draws.values():
            draw.end(self.stream.groups)
        means = {}
        for side, sums in self.sides.items():
            means[side] = sums.means()
        for tile, sums_of_both in self.tiles.items():
            x, y = self._sides(tile)
            place = self.this.tiles.index(tile)
            owner = place % ranks()
            sums_of_both.end(means[x], means[y], owner, self.draws)
        for side, sums in self.sides.items():
            sums.end(means[side], self.draws)

    def _sides(self, tile: Tile) -> tuple[Side, Side]:
        """The sides of a tile."""
        name_x, name_y = self.stream.sides
        return (name_x, tile.x), (name_y, tile.y)

    def _given(self, rows: BatchRows, side: Side) -> Given:
        """What a batch has of one side."""
        name, span = side
        by_model = getattr(rows, name)
        states, heads = by_model[span.model]
        layers = self.this.of(span)
        given = {"moments": states[layers]}
        words = rows.words
        if heads is None or not len(words):
            return given
        given |= {"heads": heads, "words": words}
        if "head_moments" in self.stream.families:
            pairs = word_pairs(heads, words, self.ahead)
            given["head_moments"] = pairs
        return given
