"""Plans the passes over the texts: which pairs of models are summed in each, so that all fit in the memory."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isqrt
from typing import NamedTuple

import torch

from aligners.datamodules.layers import LayerReader
from aligners.errors import UserError
from aligners.similarity.algebra.moments import TILE
from aligners.similarity.algebra.pairs import BLOCK, by_gram
from aligners.similarity.controls import matching_layers
from aligners.similarity.passes.sums import Matching, Shape, Stream

MOST_BLOCKS = 24  # sizes of blocks that are tried
DOUBLE, SINGLE = 8, 4  # bytes
# Copies that are there at once, as measured by benchmarks/similarity_memory.py:
BATCH = 6  # of a batch's rows of one model, in double precision
WORDS = 5  # of a batch's attention weights of one model, in double precision
PAIR = 12  # of a few layer pairs of the moments between two
BLOCKS, LAYER = (
    4,
    4,
)  # of a block of all layers' rows and Gram matrices, and of a layer of a sample of rows
FEATURES = 3  # of a sample of rows, where its sums are taken on the feature side
DISTANCES, FEW = 1.5, 2000  # of all pairs of rows, for samples of at most so many: those of RBF CKA


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
        leads: the first tile of its pair of models: it has what a pair keeps of attention, which is never divided.
        whole: the only tile of its pair.
    """

    x: Span
    y: Span
    leads: bool = True
    whole: bool = True

    @property
    def pair(self) -> tuple[int, int]:
        """Numbers of the two models."""
        return self.x.model, self.y.model


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
        return [
            place
            for span in self.spans
            if span.model == model
            for place in range(span.first, span.end)
        ]

    def of(self, span: Span) -> slice:
        """Where the layers of a span are among those that are read of its model."""
        start = self.positions(span.model).index(span.first)
        return slice(start, start + span.size)


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

    def matching(self, tile: Tile) -> Matching:
        """Positions in a tile of matching layers, for which there are intervals."""
        x, y = (self.reader.layers[span.model] for span in (tile.x, tile.y))
        pairs = (
            (x.index(a) - tile.x.first, y.index(b) - tile.y.first) for a, b in matching_layers(x, y)
        )
        return [(a, b) for a, b in pairs if 0 <= a < tile.x.size and 0 <= b < tile.y.size]

    def numbers(self, this: Pass) -> list[list[int]]:
        """Numbers of the layers that a pass reads, of each model."""
        return [
            [layers[place] for place in this.positions(m)]
            for m, layers in enumerate(self.reader.layers)
        ]


class Needs(NamedTuple):
    """Bytes that a tile takes.

    Attributes:
        shared: bytes that tiles with the same key share: of the model, and of what is kept of its layers.
        own: bytes that the tile shares with no other.
        work: what it takes for a while to compute its measures.
    """

    shared: Mapping[Hashable, int]
    own: int
    work: int


def plan_passes(
    layers: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    needs_of: Callable[[Tile], Needs],
    fixed: int,
    limit: int,
) -> list[Pass]:
    """Divide pairs of models into passes, each within the limit, such that models are read few times.

    Pairs are taken in blocks that share models, and a pass is filled as far as it goes; of several sizes of blocks the
    one is chosen that reads the fewest models over all passes. Where a pair alone is too large, the layers of all
    models are cut into as few spans as make a tile fit.

    Args:
        layers: number of layers of each model.
        pairs: numbers of the models of each pair.
        needs_of: bytes that a tile takes.
        fixed: bytes that every pass takes.
        limit: bytes.

    Raises:
        ValueError: not even one layer of each of two models fits.
    """
    for cuts in range(1, max(layers) + 1):
        needs = {tile: needs_of(tile) for pair in pairs for tile in _tiles_of(pair, layers, cuts)}
        most = fixed + max(
            sum(need.shared.values()) + need.own + need.work for need in needs.values()
        )
        if most <= limit:
            break
    else:
        raise UserError(
            f"Expected `memory` for at least one layer of each of two models, {most / 1e9:.3g} GB, but got "
            f"{limit / 1e9:.3g} GB. Raise `memory`, lower `data.batch_size`, or leave out controls or measures."
        )
    spans = spans_of(list(needs))
    smallest = max(
        1, min(need.own for need in needs.values())
    )  # a measure of texts, such as RSA, keeps none of pairs
    at_once = max(1, limit // smallest)  # tiles, at most
    largest = min(len(spans), isqrt(2 * at_once) + 1)
    plans = []
    for size in sorted(
        {max(1, largest * step // MOST_BLOCKS) for step in range(1, MOST_BLOCKS + 1)}
    ):
        plans.append(list(_filled(_in_blocks(list(needs), spans, size), needs, fixed, limit)))
        if len(plans[-1]) == 1:
            break
    return min(plans, key=lambda plan: (sum(len(this.models) for this in plan), len(plan)))


def in_words(passes: Sequence[Pass], models: Sequence[str]) -> str:
    """How many passes there are, and how often they read which models.

    Args:
        passes: all of them.
        models: names of the models.
    """
    times: dict[int, list[str]] = {}
    for m, name in enumerate(models):
        times.setdefault(sum(m in one.models for one in passes), []).append(name)
    text = "; ".join(
        f"{', '.join(names) if len(times) > 1 else 'every model'} {count} time{'s' * (count != 1)}"
        for count, names in sorted(times.items())
    )
    return f"{len(passes)} pass{'es' * (len(passes) != 1)} over the texts, and reads {text}"


def spans_of(tiles: Sequence[Tile]) -> list[Span]:
    """The spans of tiles, each once, in order."""
    return sorted({span for tile in tiles for span in (tile.x, tile.y)})


def _tiles_of(pair: tuple[int, int], layers: Sequence[int], cuts: int) -> list[Tile]:
    """The tiles of a pair whose models' layers are cut in nearly equal parts, none of them empty."""
    spans_x, spans_y = (
        [
            Span(model, *ends)
            for ends in pairwise(layers[model] * cut // parts for cut in range(parts + 1))
        ]
        for model, parts in ((model, min(cuts, layers[model])) for model in pair)
    )
    whole = len(spans_x) == len(spans_y) == 1
    return [Tile(x, y, x.first == y.first == 0, whole) for x in spans_x for y in spans_y]


def _in_blocks(tiles: Sequence[Tile], spans: Sequence[Span], size: int) -> list[Tile]:
    """Tiles in the order of blocks of `size` by `size` spans."""
    number = {span: number for number, span in enumerate(spans)}
    places = {tile: (number[tile.x], number[tile.y]) for tile in tiles}
    return sorted(
        tiles, key=lambda tile: (*(place // size for place in places[tile]), *places[tile])
    )


def _filled(
    tiles: Sequence[Tile], needs: Mapping[Tile, Needs], fixed: int, limit: int
) -> Iterator[Pass]:
    """Passes of as many tiles as fit, in the order given."""
    here: list[Tile] = []
    shared: set[Hashable] = set()
    used = work = 0
    for tile in tiles:
        need = needs[tile]
        more = need.own + sum(size for key, size in need.shared.items() if key not in shared)
        if here and fixed + used + more + max(work, need.work) > limit:
            yield Pass(tuple(here), fixed + used + work)
            here, shared, used, work = [], set(), 0, 0
            more = need.own + sum(need.shared.values())
        here.append(tile)
        shared.update(need.shared)
        used, work = used + more, max(work, need.work)
    yield Pass(tuple(here), fixed + used + work)


class PassCosts:
    """Bytes that a pass takes on each device, for `plan_passes`.

    Args:
        settings: of the comparison.
        rows: of the largest batch, at most.
        entries: of its attention matrices, for one head, at most.
        weights: bytes of each model's weights where they count: of the models themselves on a GPU, where only those are
            that a pass reads, and of untrained twins.
    """

    def __init__(self, settings: Settings, rows: int, entries: int, weights: Sequence[int]) -> None:
        self._settings, self._rows, self._entries, self._weights = settings, rows, entries, weights

    @property
    def fixed(self) -> int:
        """A batch of the largest model in double precision."""
        return (
            self._rows
            * BATCH
            * DOUBLE
            * max(shape.layers * shape.width for shape in self._settings.shapes)
        )

    def of(self, tile: Tile) -> Needs:
        """Bytes that a tile takes: for models, for layers, for their products, and while measures are computed."""
        x, y = (
            self._settings.shapes[span.model]._replace(layers=span.size)
            for span in (tile.x, tile.y)
        )
        shared: dict[Hashable, int] = {model: self._of_model(model) for model in tile.pair}
        crosses = heads = 0
        work = PAIR * max(TILE, DOUBLE * max(x.width, y.width) ** 2)
        for stream in self._settings.streams:
            work = max(work, *(_of_sample(budget, x, y) for budget in stream.budgets), 0)
            if stream.covers(tile.pair):
                for name, span, shape in zip(stream.sides, (tile.x, tile.y), (x, y), strict=True):
                    shared[stream.name, name, span] = _of_span(stream, shape)
                groups = stream.groups_of(tile.pair)
                matching = groups * len(self._settings.matching(tile)) if groups > 1 else 0
                crosses += (x.layers * y.layers + matching) * ("moments" in stream.families)
                heads += groups * (
                    4 * ("heads" in stream.families) + ("head_moments" in stream.families)
                )
        entries = (
            crosses * x.width * y.width
            + heads * tile.leads * x.blocks * x.heads * y.blocks * y.heads
        )
        return Needs(shared, DOUBLE * entries, work)

    def _of_model(self, model: int) -> int:
        """Its batch in each of the streams that read it anew, the same about its shift, and its weights."""
        shape = self._settings.shapes[model]
        copies = 1 + any(stream.name == "untrained" for stream in self._settings.streams)
        attention = shape.blocks * shape.heads * self._entries * WORDS * DOUBLE
        sides = 1 + any(stream.share is not None for stream in self._settings.streams)
        rows = (copies * SINGLE + sides * DOUBLE) * self._rows * shape.layers * shape.width
        return rows + copies * attention + self._weights[model]


def _of_span(stream: Stream, shape: Shape) -> int:
    """The moments, their whitenings and samples of some layers in one stream."""
    counted = 1 + (stream.groups if stream.groups > 1 else 0)
    fitted = (one.decomposed for one in stream.measures if one.family == "moments")
    counted += len({one.whitening for one in fitted if one})  # which measures share
    moments = counted * DOUBLE * shape.width**2 if "moments" in stream.families else 0
    return shape.layers * (moments + SINGLE * shape.width * sum(stream.budgets))


def _of_sample(n: int, x: Shape, y: Shape) -> int:
    """A layer of rows, the distances between them, and blocks of Gram matrices or all rows in double precision."""
    if by_gram(n, x.layers, x.width, y.layers, y.width, double=True):
        rows = BLOCKS * BLOCK * (x.layers * (BLOCK + x.width) + y.layers * (BLOCK + y.width))
    else:
        rows = FEATURES * n * (x.layers * x.width + y.layers * y.width)
    distances = DISTANCES * n**2 if n <= FEW else 0
    return int(DOUBLE * (rows + LAYER * n * max(x.width, y.width) + distances))
