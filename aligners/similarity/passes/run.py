"""One pass over the texts: sums batches for its tiles, and ends with what their measures are computed from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from aligners.models.model import FrozenModel
from aligners.similarity.controls import matching_layers
from aligners.similarity.functional.attention import fold
from aligners.similarity.outcome import Content
from aligners.similarity.passes.plan import Pass, Span, Tile
from aligners.similarity.passes.ranks import ranks, summed
from aligners.similarity.passes.streams import Rows, Shape, Stream
from aligners.similarity.passes.sums import Matching, SpanSums, TileSums
from aligners.similarity.sample import Draw
from datamodules.layers import LayerBatch, LayerReader
from datamodules.tokens.splits import Split

Side = tuple[str, Span]  # by which name a model's rows go, and which of its layers


class Settings(NamedTuple):
    """What all passes of a comparison have in common.

    Attributes:
        streams: the streams of paired rows.
        shapes: sizes of the models.
        reader: of the data module.
        seed: of the samples of rows and of the untrained twins.
        products: precision of the products of X with Y.
        device: where the rows are.
    """

    streams: Sequence[Stream]
    shapes: Sequence[Shape]
    reader: LayerReader
    seed: int
    products: torch.dtype
    device: torch.device

    @property
    def attention(self) -> bool:
        """Whether some measure needs attention weights."""
        return any(shape.blocks for shape in self.shapes)

    def matching(self, tile: Tile) -> Matching:
        """Positions in a tile of matching layers, for which there are intervals."""
        x, y = (self.reader.layers[span.model] for span in (tile.x, tile.y))
        pairs = ((x.index(a) - tile.x.first, y.index(b) - tile.y.first) for a, b in matching_layers(x, y))
        return [(a, b) for a, b in pairs if 0 <= a < tile.x.size and 0 <= b < tile.y.size]

    def numbers(self, this: Pass) -> list[list[int]]:
        """Numbers of the layers that a pass reads, of each model."""
        return [[layers[place] for place in this.positions(m)] for m, layers in enumerate(self.reader.layers)]


class FeatureScales:
    """Mean and standard deviation of each feature, over batches and ranks, by which features are standardised.

    Args:
        layers: L.
        width: d.
        device: where the rows are.
    """

    def __init__(self, layers: int, width: int, device: torch.device | None = None) -> None:
        self.n = torch.zeros((), dtype=torch.float64, device=device)
        self.sums, self.squares = torch.zeros(2, layers, width, dtype=torch.float64, device=device)

    def update(self, states: Tensor) -> None:
        """Add rows: (L, N, d)."""
        states = states.double()
        self.n += states.shape[1]
        self.sums += states.sum(1)
        self.squares += states.square().sum(1)

    def compute(self) -> tuple[Tensor, Tensor]:
        """Means and deviations, (L, d) each; the deviation of a constant feature is given as 1."""
        n, sums, squares = map(summed, (self.n, self.sums, self.squares))
        mean = sums / n
        variance = squares / n - mean.square()
        constant = variance <= (1e-7 * mean).square()  # what float32 leaves of a constant
        return mean, variance.where(~constant, 1).sqrt()


class PassRun:
    """Sums the batches of one pass.

    Args:
        this: the pass.
        settings: of the comparison.
    """

    def __init__(self, this: Pass, settings: Settings) -> None:
        self.this, self.settings = this, settings
        names = {stream.name for stream in settings.streams}
        self.streams = {stream.name: _StreamSums(stream, this, settings) for stream in settings.streams}
        self.twins: dict[int, FrozenModel] = {}
        self.scales: dict[int, FeatureScales] = {}
        for m in this.models:
            if "untrained" in names:
                self.twins[m] = settings.reader.models[m].untrained(settings.seed + m)
            if "standardised" in names:
                shape = settings.shapes[m]
                self.scales[m] = FeatureScales(len(this.positions(m)), shape.width, settings.device)
        self.scaling: dict[int, tuple[Tensor, Tensor]] = {}
        self.layers = settings.numbers(this)
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

    def mine(self, rank: int) -> Iterator[tuple[Tile, dict[str, Content]]]:
        """The tiles that a rank measures, each with its contents by stream, once the pass has ended."""
        for tile in self.this.tiles[rank :: ranks()]:
            yield tile, {name: sums.content(tile) for name, sums in self.streams.items() if tile in sums.tiles}

    def scatters(self) -> Iterator[tuple[Span, Tensor]]:
        """The spans of the pass with their centred scatter matrices (L, d, d), once the pass has ended."""
        for (_, span), sums in self.streams["value"].sides.items():
            if "moments" in sums.moments:
                yield span, sums.moments["moments"][0].xx

    # ------------------------------------------------------------------ the rows of each stream

    def _rows(self, batch: LayerBatch, split: Split) -> Iterator[tuple[str, Rows]]:
        """The rows of every stream that reads this split."""
        own = self._folded(batch, batch.states, batch.attention)
        for name, sums in self.streams.items():
            stream = sums.stream
            if stream.split != split or not sums.tiles:
                continue
            if stream.share is not None:
                yield name, own.rolled(stream.share)
            elif name == "untrained":
                yield name, self._untrained(batch)
            elif name == "standardised":
                yield name, own._replace(states=lambda m, side: self._scaled(batch.states[m], m))
            else:
                yield name, own

    def _untrained(self, batch: LayerBatch) -> Rows:
        reader = self.settings.reader
        read: Any = {m: reader.read_model(twin, batch, m, self.layers[m]) for m, twin in self.twins.items()}
        states = {m: states for m, (states, _) in read.items()}
        return self._folded(batch, states, None if batch.attention is None else {m: w for m, (_, w) in read.items()})

    def _scaled(self, states: Tensor, m: int) -> Tensor:
        """The states by mean and deviation of each feature on the fitting texts."""
        mean, deviation = self.scaling[m]
        return (states.double() - mean[:, None]) / deviation[:, None]

    def _folded(self, batch: LayerBatch, states: Any, attention: Any) -> Rows:
        """Rows, with attention folded to the words that all models have."""
        words, folded = batch.text[:0], {}
        if self.settings.attention and attention is not None:
            counts, places = cast(Tensor, batch.texts.word_count), cast(tuple[Tensor, ...], batch.texts.words)
            some = counts > 0
            words = counts[some]
            for m in self.this.models if len(words) else ():
                folded[m] = fold([block[some] for block in attention[m]], places[m][some], words)
        return Rows(batch.text, batch.token, lambda m, side: states[m], lambda m, side: folded[m], words)


class _StreamSums:
    """What a pass keeps of one stream.

    Args:
        stream: which.
        this: the pass.
        settings: of the comparison.
    """

    def __init__(self, stream: Stream, this: Pass, settings: Settings) -> None:
        self.stream, self.this, device = stream, this, settings.device
        self.draws = {budget: Draw(budget, settings.seed, device) for budget in stream.budgets}
        self.tiles: dict[Tile, TileSums] = {}
        self.sides: dict[Side, SpanSums] = {}
        groups: dict[Side, int] = {}
        for tile in this.tiles:
            if stream.covers(tile.pair):
                x, y = (settings.shapes[span.model]._replace(layers=span.size) for span in (tile.x, tile.y))
                heads, own = settings.attention and tile.leads, stream.groups_of(tile.pair)
                self.tiles[tile] = TileSums(
                    stream, x, y, settings.matching(tile), own, heads, settings.products, device
                )
                groups |= {side: max(own, groups.get(side, 1)) for side in self._sides(tile)}
        for side, count in groups.items():
            shape = settings.shapes[side[1].model]._replace(layers=side[1].size)
            self.sides[side] = SpanSums(stream, shape, count, settings.attention and side[1].first == 0, device)

    def _sides(self, tile: Tile) -> tuple[Side, Side]:
        name_x, name_y = self.stream.sides
        return (name_x, tile.x), (name_y, tile.y)

    def update(self, rows: Rows, group: int) -> None:
        """Add a batch."""
        admitted = {budget: draw.admit(rows.text, rows.token) for budget, draw in self.draws.items()}
        attends = len(rows.words) > 0
        for side, sums in self.sides.items():
            sums.update_states(self._states(rows, side), group, admitted)
            if attends:
                sums.update_heads(self._weights(rows, side), rows.words, group)
        for tile, sums_of_both in self.tiles.items():
            x, y = self._sides(tile)
            both = self.sides[x], self.sides[y]
            sums_of_both.update_states(*both, self._states(rows, x), self._states(rows, y), group)
            if attends:
                sums_of_both.update_heads(*both, self._weights(rows, x), self._weights(rows, y), rows.words, group)

    def _states(self, rows: Rows, side: Side) -> Tensor:
        name, span = side
        return rows.states(span.model, name)[self.this.of(span)]

    def _weights(self, rows: Rows, side: Side) -> Tensor:
        name, span = side
        return rows.weights(span.model, name)

    def end(self) -> None:
        """Add up all ranks."""
        for draw in self.draws.values():
            draw.end(self.stream.groups)
        moves = {side: sums.moves() for side, sums in self.sides.items()}
        for tile, sums in self.tiles.items():
            x, y = self._sides(tile)
            sums.end(moves[x], moves[y], self.this.tiles.index(tile) % ranks())
        for side, sums_of_one in self.sides.items():
            sums_of_one.end(moves[side], self.draws)

    def content(self, tile: Tile) -> Content:
        """What the measures of a tile are computed from."""
        x, y = (self.sides[side] for side in self._sides(tile))
        return Content(x, y, self.tiles[tile], {budget: draw.text for budget, draw in self.draws.items()})
