"""Plans the passes over the texts: which pairs of models are summed in each, so that all fit in the memory."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

import torch

from aligners.datamodules.layers import LayerReader
from aligners.errors import UserError
from aligners.similarity.controls import matching_layers
from aligners.similarity.passes.streams import Shape, Stream


@dataclass(frozen=True, order=True)
class Span:
    """Some consecutive layers of a model: all of them, unless a pair of models alone would be too large.

    Attributes:
        model: its number.
        first: position of the first among the model's layers; end: position after the last.
    """

    model: int
    first: int
    end: int

    @property
    def layers(self) -> slice:
        """Their positions."""
        return slice(self.first, self.end)

    @property
    def size(self) -> int:
        """How many there are."""
        return self.end - self.first


class Tile(NamedTuple):
    """The layer pairs of two spans, which are summed and measured together.

    Attributes:
        x: of X; y: of Y.
        whole: whether these are all layers of both models.
    """

    x: Span
    y: Span
    whole: bool = True

    @property
    def pair(self) -> tuple[int, int]:
        """Numbers of the two models."""
        return self.x.model, self.y.model

    @property
    def leads(self) -> bool:
        """Whether it has what a pair of models keeps of attention, which is never divided."""
        return self.x.first == self.y.first == 0


@dataclass(frozen=True)
class Pass:
    """One pass over the texts.

    Attributes:
        tiles: what is summed in it.
        bytes: the memory that this takes.
    """

    tiles: tuple[Tile, ...]
    bytes: int

    @cached_property
    def spans(self) -> list[Span]:
        """The layers that are read, each once."""
        return spans_of(self.tiles)

    @cached_property
    def models(self) -> list[int]:
        """Numbers of the models that are read."""
        return sorted({span.model for span in self.spans})

    def positions(self, model: int) -> list[int]:
        """Positions of the layers that are read of a model, among all of its layers that are compared."""
        positions: list[int] = []
        for span in self.spans:
            if span.model == model:
                positions += range(span.first, span.end)
        return positions

    def of(self, span: Span) -> slice:
        """Where the layers of a span are among those that are read of its model."""
        start = self.positions(span.model).index(span.first)
        return slice(start, start + span.size)


def spans_of(tiles: Sequence[Tile]) -> list[Span]:
    """The spans of tiles, each once, in order."""
    spans: set[Span] = set()
    for tile in tiles:
        spans |= {tile.x, tile.y}
    return sorted(spans)


class Settings(NamedTuple):
    """What all passes of a comparison have in common.

    Attributes:
        streams: the streams of paired rows.
        shapes: sizes of the models.
        reader: of the data module.
        seed: seed of the samples of rows and of the untrained twins.
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

    def shape_of(self, span: Span) -> Shape:
        """Sizes of its model, with the layers of the span."""
        return self.shapes[span.model]._replace(layers=span.size)

    def matching(self, tile: Tile) -> list[tuple[int, int]]:
        """Positions in a tile of matching layers, for which there are intervals."""
        layers_x = self.reader.layers[tile.x.model]
        layers_y = self.reader.layers[tile.y.model]
        positions = []
        for layer_x, layer_y in matching_layers(layers_x, layers_y):
            a = layers_x.index(layer_x) - tile.x.first
            b = layers_y.index(layer_y) - tile.y.first
            if 0 <= a < tile.x.size and 0 <= b < tile.y.size:
                positions.append((a, b))
        return positions

    def layers_read(self, this: Pass) -> list[list[int]]:
        """Numbers of the layers that a pass reads, of each model."""
        read: list[list[int]] = []
        for m, layers in enumerate(self.reader.layers):
            positions = this.positions(m)
            read.append([layers[place] for place in positions])
        return read


def plan_passes(
    layers: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    bytes_of: Callable[[Sequence[Tile]], int],
    limit: int,
) -> list[Pass]:
    """Divide pairs of models into passes, each within the limit, which are filled as far as it goes.

    Where a pair alone is too large, the layers of all models are cut into as few spans as fit.

    Args:
        layers: number of layers of each model.
        pairs: numbers of the models of each pair.
        bytes_of: the memory that tiles take together in one pass.
        limit: bytes.

    Raises:
        ValueError: not even one layer of each of two models fits.
    """
    for parts in range(1, max(layers) + 1):
        tiles: list[Tile] = []
        for pair in pairs:
            tiles += _tiles_of(pair, layers, parts)
        most = max(bytes_of([tile]) for tile in tiles)
        if most <= limit:
            return _filled(tiles, bytes_of, limit)
    raise UserError(
        f"Expected `memory` for at least one layer of each of two models, {most / 1e9:.3g} GB, but got "
        f"{limit / 1e9:.3g} GB. Raise `memory`, lower `data.batch_size`, or leave out controls or measures."
    )


def in_words(passes: Sequence[Pass], models: Sequence[str]) -> str:
    """How many passes there are, and how often they read which models.

    Args:
        passes: all of them.
        models: names of the models.
    """
    times: Counter[int] = Counter()
    for this in passes:
        times.update(this.models)
    names_by_times: dict[int, list[str]] = {}
    for m, name in enumerate(models):
        names_by_times.setdefault(times[m], []).append(name)
    parts = []
    for count, names in sorted(names_by_times.items()):
        who = "every model"
        if len(names_by_times) > 1:
            who = ", ".join(names)
        parts.append(f"{who} {count} time{'s' * (count != 1)}")
    number = f"{len(passes)} pass{'es' * (len(passes) != 1)}"
    return f"{number} over the texts, and reads {'; '.join(parts)}"


def _tiles_of(pair: tuple[int, int], layers: Sequence[int], parts: int) -> list[Tile]:
    """The tiles of a pair of models whose layers are cut into so many parts."""
    i, j = pair
    spans_x = _cut(i, layers[i], parts)
    spans_y = _cut(j, layers[j], parts)
    whole = len(spans_x) == len(spans_y) == 1
    return [Tile(x, y, whole) for x, y in product(spans_x, spans_y)]


def _cut(model: int, layers: int, parts: int) -> list[Span]:
    """A model's layers in nearly equal parts, none of them empty."""
    parts = min(parts, layers)
    ends = [layers * part // parts for part in range(parts + 1)]
    return [Span(model, first, end) for first, end in pairwise(ends)]


def _filled(
    tiles: Sequence[Tile], bytes_of: Callable[[Sequence[Tile]], int], limit: int
) -> list[Pass]:
    """Passes of as many tiles as fit, in the order given."""
    taken = bytes_of(tiles)
    if taken <= limit:
        return [Pass(tuple(tiles), taken)]
    passes = []
    here: list[Tile] = []
    for tile in tiles:
        if here and bytes_of([*here, tile]) > limit:
            passes.append(Pass(tuple(here), bytes_of(here)))
            here = []
        here.append(tile)
    return [*passes, Pass(tuple(here), bytes_of(here))]
