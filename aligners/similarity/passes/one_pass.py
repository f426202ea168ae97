"""One pass over the texts: sums batches for its tiles, and ends with what their measures are computed from."""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from aligners.datamodules.layers import LayerBatch
from aligners.datamodules.tokens.splits import Split
from aligners.models.model import FrozenModel
from aligners.similarity.algebra.moments import constant_features
from aligners.similarity.controls import Draw
from aligners.similarity.functional.attention import fold, word_pairs
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

    def __init__(
        self, layers: int, width: int, device: torch.device | None = None
    ) -> None:
        shape = (3, layers, width)  # of 1, x and x²
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)

    def update(self, states: Tensor) -> None:
        """Add rows: (L, N, d)."""
        states = states.double()
        self._sums[0] += states.shape[1]
        self._sums[1] += states.sum(1)
        self._sums[2] += states.square().sum(1)

    def compute(self) -> tuple[Tensor, Tensor]:
        """Means and deviations, (L, d) each; the deviation of a constant feature is given as 1."""
        n, sums, squares = summed(self._sums)
        mean = sums / n
        variance = squares / n - mean.square()
        varies = ~constant_features(variance, mean)
        return mean, variance.where(varies, 1).sqrt()


class PassRun:
    """Sums the batches of one pass.

    Args:
        this: the pass.
        settings: of the comparison.
    """

    def __init__(self, this: Pass, settings: Settings) -> None:
        self.this = this
        self.settings = settings
        self.layers = settings.layers_read(this)
        self.rows = torch.zeros((), dtype=torch.float64, device=settings.device)
        self.streams: dict[str, StreamSums] = {}
        for stream in settings.streams:
            self.streams[stream.name] = StreamSums(stream, this, settings)
        self.twins: dict[int, FrozenModel] = {}
        self.scales: dict[int, FeatureScales] = {}
        for m in this.models:
            if "untrained" in self.streams:
                model = settings.reader.models[m]
                self.twins[m] = model.untrained(settings.seed + m)
            if "standardised" in self.streams:
                layers, width = len(self.layers[m]), settings.shapes[m].width
                self.scales[m] = FeatureScales(layers, width, settings.device)

    def add(self, batch: LayerBatch, split: Split, group: int) -> None:
        """Add one batch, all of whose texts belong to one group."""
        if split == "test":
            self.rows += len(batch.text)
        else:
            for m, scales in self.scales.items():
                scales.update(batch.states[m])
        observed = self._folded(batch, batch.states, batch.attention)
        for sums in self.streams.values():
            if sums.stream.split == split and sums.tiles:
                rows = self._rows_of(sums.stream, batch, observed)
                sums.update(rows, group)

    def end_fit(self) -> None:
        """Take mean and deviation of every feature over the fitting texts of all ranks."""
        self.scaling = {m: scales.compute() for m, scales in self.scales.items()}

    def end(self) -> None:
        """Add up all ranks, which get the tiles in turn."""
        self.rows = summed(self.rows)
        self.twins = {}
        for sums in self.streams.values():
            sums.end()

    def mine(self) -> list[Tile]:
        """The tiles that this rank measures."""
        return list(self.this.tiles[this_rank() :: ranks()])

    def take(self, tile: Tile) -> dict[str, TileSums]:
        """The sums of a tile by stream, once the pass has ended; they are given away."""
        taken = {}
        for name, sums in self.streams.items():
            if tile in sums.tiles:
                taken[name] = sums.tiles.pop(tile)
        return taken

    def scatters(self) -> Iterator[tuple[Span, Tensor]]:
        """The spans of the pass with their centred scatter matrices (L, d, d), once the pass has ended."""
        for (_, span), sums in self.streams["value"].sides.items():
            if "moments" in sums.moments:
                yield span, sums.moments["moments"][0].xx

    # ------------------------------------------------------------------ the rows of each stream

    def _rows_of(
        self, stream: Stream, batch: LayerBatch, observed: BatchRows
    ) -> BatchRows:
        """The rows of a batch in one of the streams."""
        if stream.share is not None:
            return observed.rolled(stream.share)
        if stream.name == "untrained":
            return self._untrained(batch)
        if stream.name in FAR_VALUES.values():
            beside = batch.counterpart
            return self._folded(beside, beside.states, None)
        if stream.name == "standardised":
            rows = {m: self._standardised(batch, m) for m in self.this.models}
            return observed._replace(x=rows, y=rows)
        return observed

    def _untrained(self, batch: LayerBatch) -> BatchRows:
        """The rows that the untrained twins have of the same texts."""
        states, attention = {}, {}
        reader = self.settings.reader
        for m, twin in self.twins.items():
            read = reader.read_model(twin, batch, m, self.layers[m])
            states[m], attention[m] = read
        return self._folded(batch, states, attention)

    def _standardised(self, batch: LayerBatch, m: int) -> ModelRows:
        """The states of a model by mean and deviation of each feature on the fitting texts."""
        mean, deviation = self.scaling[m]
        centred = batch.states[m].double() - mean[:, None]
        return ModelRows(centred / deviation[:, None])

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
                heads = fold(blocks, places[m][some], words)
            rows[m] = ModelRows(states[m], heads)
        return BatchRows(batch.text, batch.token, words, x=rows, y=rows)


class StreamSums:
    """What a pass keeps of one stream.

    Args:
        stream: which.
        this: the pass.
        settings: of the comparison.
    """

    def __init__(self, stream: Stream, this: Pass, settings: Settings) -> None:
        self.stream = stream
        self.this = this
        # the same rows for every pair of models, whatever else is in this pass
        self.ahead = not any(model.causal for model in settings.reader.models)
        self.draws: dict[int, Draw] = {}
        for budget in stream.budgets:
            self.draws[budget] = Draw(budget, settings.seed, settings.device)

        self.sides: dict[Side, SpanSums] = {}
        self.tiles: dict[Tile, TileSums] = {}
        for tile in this.tiles:
            if not stream.covers(tile.pair):
                continue
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
        given: dict[Side, Given] = {}
        for side, sums in self.sides.items():
            given[side] = self._given(rows, side)
            sums.update(given[side], group, admitted)
        for tile, sums_of_both in self.tiles.items():
            x, y = self._sides(tile)
            sums_of_both.update(given[x], given[y], group)

    def end(self) -> None:
        """Add up all ranks."""
        for draw in self.draws.values():
            draw.end(self.stream.groups)
        means = {}
        for side, sums in self.sides.items():
            means[side] = sums.means()
        for tile, sums_of_both in self.tiles.items():
            x, y = self._sides(tile)
            owner = self.this.tiles.index(tile) % ranks()
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
        states, heads = getattr(rows, name)[span.model]
        given = {"moments": states[self.this.of(span)]}
        if heads is None or not len(rows.words):
            return given
        given |= {"heads": heads, "words": rows.words}
        if "head_moments" in self.stream.families:
            given["head_moments"] = word_pairs(heads, rows.words, self.ahead)
        return given
