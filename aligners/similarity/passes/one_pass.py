"""One pass over the texts: sums batches for its tiles, and ends with what their measures are computed from."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from aligners.datamodules.layers import LayerBatch
from aligners.datamodules.tokens.splits import Split
from aligners.models.model import FrozenModel
from aligners.similarity.algebra.moments import constant_features
from aligners.similarity.controls import Draw
from aligners.similarity.functional.attention import fold, word_pairs
from aligners.similarity.passes.pass_plan import Pass, Settings, Span, Tile
from aligners.similarity.passes.ranks import ranks, summed
from aligners.similarity.passes.sums import FAR_VALUES, BatchRows, Given, SpanSums, Stream, TileSums

Side = tuple[str, Span]  # by which name a model's rows go, and which of its layers


class FeatureScales:
    """Mean and standard deviation of each feature, over batches and ranks, by which features are standardised.

    Args:
        layers: L.
        width: d.
        device: where the rows are.
    """

    def __init__(self, layers: int, width: int, device: torch.device | None = None) -> None:
        self._sums = torch.zeros(
            3, layers, width, dtype=torch.float64, device=device
        )  # of 1, x and x²

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
        return mean, variance.where(~constant_features(variance, mean), 1).sqrt()


class PassRun:
    """Sums the batches of one pass.

    Args:
        this: the pass.
        settings: of the comparison.
    """

    def __init__(self, this: Pass, settings: Settings) -> None:
        self.this, self.settings, self.layers = this, settings, settings.numbers(this)
        self.streams = {
            stream.name: _StreamSums(stream, this, settings) for stream in settings.streams
        }
        self.twins: dict[int, FrozenModel] = {}
        self.scales: dict[int, FeatureScales] = {}
        for m in this.models:
            if "untrained" in self.streams:
                self.twins[m] = settings.reader.models[m].untrained(settings.seed + m)
            if "standardised" in self.streams:
                self.scales[m] = FeatureScales(
                    len(self.layers[m]), settings.shapes[m].width, settings.device
                )
        self.scaling: dict[int, tuple[Tensor, Tensor]] = {}
        self.rows = torch.zeros((), dtype=torch.float64, device=settings.device)

    def add(self, batch: LayerBatch, split: Split, group: int) -> None:
        """Add one batch, all of whose texts belong to one group."""
        if split == "test":
            self.rows += len(batch.text)
        else:
            for m, scales in self.scales.items():
                scales.update(batch.states[m])
        for name, rows in self._rows(batch, split):
            self.streams[name].update(rows, group)

    def end_fit(self) -> None:
        """Take mean and deviation of every feature over the fitting texts of all ranks."""
        self.scaling = {m: scales.compute() for m, scales in self.scales.items()}

    def end(self) -> None:
        """Add up all ranks, which get the tiles in turn."""
        self.rows, self.twins = summed(self.rows), {}
        for stream in self.streams.values():
            stream.end()

    def mine(self, rank: int) -> Iterator[tuple[Tile, dict[str, TileSums]]]:
        """The tiles that a rank measures, each with its sums by stream, once the pass has ended; it gives them away."""
        for tile in self.this.tiles[rank :: ranks()]:
            yield (
                tile,
                {
                    name: sums.tiles.pop(tile)
                    for name, sums in self.streams.items()
                    if tile in sums.tiles
                },
            )

    def scatters(self) -> Iterator[tuple[Span, Tensor]]:
        """The spans of the pass with their centred scatter matrices (L, d, d), once the pass has ended."""
        for (_, span), sums in self.streams["value"].sides.items():
            if "moments" in sums.moments:
                yield span, sums.moments["moments"][0].xx

    # ------------------------------------------------------------------ the rows of each stream

    def _rows(self, batch: LayerBatch, split: Split) -> Iterator[tuple[str, BatchRows]]:
        """The rows of every stream that reads this split."""
        attention: Sequence[Any] = batch.attention or [None] * len(batch.states)
        rows = self._folded(batch, {m: (batch.states[m], attention[m]) for m in self.this.models})
        for name, sums in self.streams.items():
            if sums.stream.split != split or not sums.tiles:
                continue
            if sums.stream.share is not None:
                yield name, rows.rolled(sums.stream.share)
            elif name == "untrained":
                read, layers = self.settings.reader.read_model, self.layers
                yield (
                    name,
                    self._folded(
                        batch,
                        {m: read(twin, batch, m, layers[m]) for m, twin in self.twins.items()},
                    ),
                )
            elif name in FAR_VALUES.values():
                beside = batch.counterpart
                yield (
                    name,
                    self._folded(beside, {m: (beside.states[m], None) for m in self.this.models}),
                )
            elif name == "standardised":
                yield (
                    name,
                    rows._replace(of=lambda m, side: (self._scaled(batch.states[m], m), None)),
                )
            else:
                yield name, rows

    def _scaled(self, states: Tensor, m: int) -> Tensor:
        """The states by mean and deviation of each feature on the fitting texts."""
        mean, deviation = self.scaling[m]
        return (states.double() - mean[:, None]) / deviation[:, None]

    def _folded(self, batch: LayerBatch, read: Mapping[int, tuple[Tensor, Any]]) -> BatchRows:
        """Rows from the states and attention of each model, with attention folded to the words that all models have."""
        words = batch.text[:0]
        by_model: dict[int, tuple[Tensor, Tensor | None]] = {
            m: (states, None) for m, (states, _) in read.items()
        }
        if self.settings.attention:
            counts, places = (
                cast(Tensor, batch.texts.word_count),
                cast(tuple[Tensor, ...], batch.texts.words),
            )
            some = counts > 0
            words = counts[some]
            for m, (states, attention) in read.items() if len(words) else ():
                by_model[m] = (
                    states,
                    fold([block[some] for block in attention], places[m][some], words),
                )
        return BatchRows(batch.text, batch.token, words, lambda m, side: by_model[m])


class _StreamSums:
    """What a pass keeps of one stream.

    Args:
        stream: which.
        this: the pass.
        settings: of the comparison.
    """

    def __init__(self, stream: Stream, this: Pass, settings: Settings) -> None:
        self.stream, self.this, device = stream, this, settings.device
        # the same rows for every pair of models, whatever else is in this pass
        self.ahead = not any(model.causal for model in settings.reader.models)
        self.draws = {budget: Draw(budget, settings.seed, device) for budget in stream.budgets}
        tiles = [tile for tile in this.tiles if stream.covers(tile.pair)]
        groups: dict[Side, int] = {}
        for tile in tiles:
            groups |= {
                side: max(stream.groups_of(tile.pair), groups.get(side, 1))
                for side in self._sides(tile)
            }
        self.sides: dict[Side, SpanSums] = {}
        for (name, span), count in groups.items():
            shape, heads = settings.shapes[span.model]._replace(layers=span.size), span.first == 0
            self.sides[name, span] = SpanSums(
                stream, shape, count, settings.attention and heads, device
            )
        self.tiles: dict[Tile, TileSums] = {}
        for tile in tiles:
            x, y = (self.sides[side] for side in self._sides(tile))
            count, heads = stream.groups_of(tile.pair), settings.attention and tile.leads
            self.tiles[tile] = TileSums(
                stream, x, y, settings.matching(tile), count, heads, settings.products
            )

    def _sides(self, tile: Tile) -> tuple[Side, Side]:
        name_x, name_y = self.stream.sides
        return (name_x, tile.x), (name_y, tile.y)

    def update(self, rows: BatchRows, group: int) -> None:
        """Add a batch."""
        admitted = {
            budget: draw.admit(rows.text, rows.token) for budget, draw in self.draws.items()
        }
        for side, sums in self.sides.items():
            sums.update(self._given(rows, side), group, admitted)
        for tile, sums_of_both in self.tiles.items():
            x, y = (self._given(rows, side) for side in self._sides(tile))
            sums_of_both.update(x, y, group)
        for sums in self.sides.values():
            sums.shifted = {}

    def _given(self, rows: BatchRows, side: Side) -> Given:
        """What a batch has of one side."""
        name, span = side
        states, weights = rows.of(span.model, name)
        given = {"moments": states[self.this.of(span)]}
        if weights is not None and len(rows.words):
            given |= {"heads": weights, "words": rows.words}
            if "head_moments" in self.stream.families:
                given["head_moments"] = word_pairs(weights, rows.words, self.ahead)
        return given

    def end(self) -> None:
        """Add up all ranks."""
        for draw in self.draws.values():
            draw.end(self.stream.groups)
        texts = {budget: draw.text for budget, draw in self.draws.items()}
        means = {side: sums.means() for side, sums in self.sides.items()}
        for tile, sums in self.tiles.items():
            x, y = (means[side] for side in self._sides(tile))
            sums.end(x, y, self.this.tiles.index(tile) % ranks(), texts)
        for side, sums_of_one in self.sides.items():
            sums_of_one.end(means[side], self.draws)
