"""Estimates the memory of a pass before it begins."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from aligners.similarity.algebra.moments import TILE
from aligners.similarity.algebra.pairs import BLOCK, by_gram
from aligners.similarity.passes.plan import Needs, Span, Tile
from aligners.similarity.passes.run import Settings
from aligners.similarity.passes.streams import Stream

DOUBLE, SINGLE = 8, 4  # bytes
# Copies that are there at once, as measured by benchmarks/similarity_memory.py:
BATCH = 6  # of a batch's rows of one model, in double precision
WORDS = 5  # of a batch's attention weights of one model, in double precision
WHITENINGS = 3  # of the moments within both models of a tile
PAIR = 12  # of a few layer pairs of the moments between two
BLOCKS, LAYER = 4, 4  # of a block of all layers' rows and Gram matrices, and of a layer of a sample of rows
FEATURES = 3  # of a sample of rows, where its sums are taken on the feature side
DISTANCES, FEW = 1.5, 2000  # of all pairs of rows, for samples of at most so many: those of RBF CKA


class Batches(NamedTuple):
    """Sizes of the largest batch.

    Attributes:
        rows: number of rows, at most.
        entries: number of entries of its attention matrices, for one head.
    """

    rows: int
    entries: int


class PassCosts:
    """Bytes that a pass takes on each device, for `aligners.similarity.passes.plan.plan_passes`.

    Args:
        settings: of the comparison.
        batches: sizes of the largest batch.
        weights: bytes of each model's weights where they count: of the models themselves on a GPU, where only those are
            that a pass reads, and of untrained twins.
    """

    def __init__(self, settings: Settings, batches: Batches, weights: Sequence[int]) -> None:
        self._streams, self._shapes, self._matching = settings.streams, settings.shapes, settings.matching
        self._batches, self._weights = batches, weights
        self._fits = any(measure.chance is not None for stream in settings.streams for measure in stream.measures)

    @property
    def fixed(self) -> int:
        """A batch of the two largest models in double precision."""
        return self._batches.rows * BATCH * DOUBLE * max(shape.layers * shape.width for shape in self._shapes)

    def of(self, tile: Tile) -> Needs:
        """What a tile takes."""
        return Needs(self._shared(tile), self._own(tile), self._work(tile))

    def _shared(self, tile: Tile) -> dict[Hashable, int]:
        """What is kept of each model and of its layers."""
        found: dict[Hashable, int] = {model: self._of_model(model) for model in tile.pair}
        for stream in self._streams:
            if stream.covers(tile.pair):
                for name, span in zip(stream.sides, (tile.x, tile.y), strict=True):
                    found[stream.name, name, span] = self._of_span(stream, span)
        return found

    def _of_model(self, model: int) -> int:
        """Its batch in each of the streams that read it anew, and its weights."""
        shape = self._shapes[model]
        copies = 1 + any(stream.name == "untrained" for stream in self._streams)
        attention = shape.blocks * shape.heads * self._batches.entries * WORDS * DOUBLE
        return copies * (SINGLE * self._batches.rows * shape.layers * shape.width + attention) + self._weights[model]

    def _of_span(self, stream: Stream, span: Span) -> int:
        width = self._shapes[span.model].width
        counted = 1 + (stream.groups if stream.groups > 1 else 0)
        moments = counted * DOUBLE * width**2 if "moments" in stream.families else 0
        return span.size * (moments + SINGLE * width * sum(stream.budgets))

    def _own(self, tile: Tile) -> int:
        """The cross moments of all streams, those of matching layers group by group, and sums over heads."""
        x, y = (self._shapes[span.model] for span in (tile.x, tile.y))
        crosses, heads = 0, 0
        for stream in self._streams:
            if stream.covers(tile.pair):
                groups = stream.groups_of(tile.pair)
                matching = groups * len(self._matching(tile)) if groups > 1 else 0
                crosses += (tile.x.size * tile.y.size + matching) * ("moments" in stream.families)
                heads += groups * (4 * ("heads" in stream.families) + ("head_moments" in stream.families))
        return DOUBLE * (crosses * x.width * y.width + heads * tile.leads * x.blocks * x.heads * y.blocks * y.heads)

    def _work(self, tile: Tile) -> int:
        """The most that is there at once while the measures of a tile are computed."""
        x, y = (self._shapes[span.model] for span in (tile.x, tile.y))
        some = PAIR * max(TILE, DOUBLE * max(x.width, y.width) ** 2)
        if self._fits:
            some += WHITENINGS * DOUBLE * (tile.x.size * x.width**2 + tile.y.size * y.width**2)
        drawn = [
            _of_sample(budget, tile.x.size, x.width, tile.y.size, y.width)
            for stream in self._streams
            for budget in stream.budgets
        ]
        return max(some, *drawn, 0)


def _of_sample(n: int, l_x: int, d_x: int, l_y: int, d_y: int) -> int:
    """A layer of rows, the distances between them, and blocks of Gram matrices or all rows in double precision."""
    if by_gram(n, l_x, d_x, l_y, d_y, double=True):
        rows = BLOCKS * BLOCK * (l_x * (BLOCK + d_x) + l_y * (BLOCK + d_y))
    else:
        rows = FEATURES * n * (l_x * d_x + l_y * d_y)
    distances = DISTANCES * n**2 if n <= FEW else 0
    return int(DOUBLE * (rows + LAYER * n * max(d_x, d_y) + distances))
