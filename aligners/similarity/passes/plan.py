"""Plans the passes over the texts: which pairs of models are summed in each, so that all fit in the memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isqrt
from typing import NamedTuple

from aligners.errors import UserError

MOST_BLOCKS = 24  # sizes of blocks that are tried


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
        return [place for span in self.spans if span.model == model for place in range(span.first, span.end)]

    def of(self, span: Span) -> slice:
        """Where the layers of a span are among those that are read of its model."""
        start = self.positions(span.model).index(span.first)
        return slice(start, start + span.size)


class Needs(NamedTuple):
    """Bytes that a tile takes.

    Attributes:
        shared: what tiles have in common if they have the same key: the model, what is kept of its layers.
        own: what the tile keeps for itself.
        work: what it takes for a while to compute its measures.
    """

    shared: Mapping[Hashable, int]
    own: int
    work: int


def plan_passes(
    layers: Sequence[int], pairs: Sequence[tuple[int, int]], needs_of: Callable[[Tile], Needs], fixed: int, limit: int
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
    needs = _tiles_that_fit(layers, pairs, needs_of, fixed, limit)
    tiles = list(needs)
    models = len({span.model for tile in tiles for span in (tile.x, tile.y)})
    smallest = max(
        1, min(need.own for need in needs.values())
    )  # a measure of texts, such as RSA, keeps nothing of pairs
    at_once = max(1, limit // smallest)  # tiles, at most
    largest = min(len(spans_of(tiles)), isqrt(2 * at_once) + 1)
    sizes = sorted({max(1, largest * step // MOST_BLOCKS) for step in range(1, MOST_BLOCKS + 1)})
    plans = []
    for size in sizes:
        plans.append(list(_filled(_in_blocks(tiles, size), needs, fixed, limit)))
        if len(plans[-1]) == 1:
            break
    return min(plans, key=lambda plan: (sum(len(each.models) for each in plan), len(plan), models))


def in_words(passes: Sequence[Pass], models: Sequence[str]) -> str:
    """How many passes there are, and how often they read which models.

    Args:
        passes: all of them.
        models: names of the models.
    """
    times: dict[int, list[str]] = {}
    for m, name in enumerate(models):
        times.setdefault(sum(m in each.models for each in passes), []).append(name)
    said = "; ".join(
        f"{', '.join(names) if len(times) > 1 else 'every model'} {count} time{'s' * (count != 1)}"
        for count, names in sorted(times.items())
    )
    return f"{len(passes)} pass{'es' * (len(passes) != 1)} over the texts, and reads {said}"


def spans_of(tiles: Sequence[Tile]) -> list[Span]:
    """The spans of tiles, each once, in order."""
    return sorted({span for tile in tiles for span in (tile.x, tile.y)})


def _tiles_that_fit(
    layers: Sequence[int], pairs: Sequence[tuple[int, int]], needs_of: Callable[[Tile], Needs], fixed: int, limit: int
) -> dict[Tile, Needs]:
    """The largest tiles of which each fits on its own, with what they need."""
    for cuts in range(1, max(layers) + 1):
        needs = {tile: needs_of(tile) for pair in pairs for tile in _tiles_of(pair, layers, cuts)}
        most = fixed + max(sum(need.shared.values()) + need.own + need.work for need in needs.values())
        if most <= limit:
            return needs
    raise UserError(
        f"Expected `memory` for at least one layer of each of two models, {most / 1e9:.3g} GB, but got "
        f"{limit / 1e9:.3g} GB. Raise `memory`, lower `data.batch_size`, or leave out controls or measures."
    )


def _tiles_of(pair: tuple[int, int], layers: Sequence[int], cuts: int) -> list[Tile]:
    spans_x, spans_y = (_spans(model, layers[model], cuts) for model in pair)
    whole = len(spans_x) == len(spans_y) == 1
    return [Tile(x, y, a == b == 0, whole) for a, x in enumerate(spans_x) for b, y in enumerate(spans_y)]


def _spans(model: int, layers: int, cuts: int) -> list[Span]:
    """A model's layers in nearly equal parts, none of them empty."""
    cuts = min(cuts, layers)
    bounds = [layers * cut // cuts for cut in range(cuts + 1)]
    return [Span(model, first, end) for first, end in pairwise(bounds)]


def _in_blocks(tiles: Sequence[Tile], size: int) -> list[Tile]:
    """Tiles in the order of blocks of `size` by `size` spans."""
    place = {span: number for number, span in enumerate(spans_of(tiles))}

    def order(tile: Tile) -> tuple[int, ...]:
        x, y = place[tile.x], place[tile.y]
        return x // size, y // size, x, y

    return sorted(tiles, key=order)


def _filled(tiles: Sequence[Tile], needs: Mapping[Tile, Needs], fixed: int, limit: int) -> Iterator[Pass]:
    """Passes of as many tiles as fit, in the order given."""
    here: list[Tile] = []
    shared: set[Hashable] = set()
    kept = work = 0
    for tile in tiles:
        need = needs[tile]
        more = need.own + sum(size for key, size in need.shared.items() if key not in shared)
        if here and fixed + kept + more + max(work, need.work) > limit:
            yield Pass(tuple(here), fixed + kept + work)
            here, shared, kept, work = [], set(), 0, 0
            more = need.own + sum(need.shared.values())
        here.append(tile)
        shared.update(need.shared)
        kept, work = kept + more, max(work, need.work)
    yield Pass(tuple(here), fixed + kept + work)
