"""What one pass keeps of two models, from their rows."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from aligners.similarity.catalogue import Measure
from aligners.similarity.controls import Draw
from aligners.similarity.functional.attention import word_pairs
from aligners.similarity.passes.sums import Shape, SpanSums, Stream, TileSums

__all__ = ["content_of"]

CPU = torch.device("cpu")


def content_of(
    x: Tensor, y: Tensor, measures: Iterable[Measure], weights: Sequence[Tensor] = (), words: Tensor | None = None
) -> TileSums:
    """What measures are computed from: x (L_x, N, d_x), y (L_y, N, d_y), each row a text; or attention weights."""
    stream, rows = Stream("value", tuple(measures)), torch.arange(x.shape[1])
    draws = {budget: Draw(budget, 0, CPU) for budget in stream.budgets}
    admitted = {budget: draw.admit(rows, rows) for budget, draw in draws.items()}
    given = [{"moments": states} for states in (x, y)]
    shapes = [Shape(len(states), states.shape[2]) for states in (x, y)]
    if words is not None:
        for side, own in enumerate(weights):
            given[side] |= {"heads": own, "words": words, "head_moments": word_pairs(own, words)}
            shapes[side] = shapes[side]._replace(blocks=own.shape[0], heads=own.shape[1])
    sides = [SpanSums(stream, shape, 1, words is not None, CPU) for shape in shapes]
    tile = TileSums(stream, sides[0], sides[1], [], 1, words is not None, torch.float64)
    for side, own_rows in zip(sides, given, strict=True):
        side.update(own_rows, 0, admitted)
    tile.update(given[0], given[1], 0)
    for draw in draws.values():
        draw.end(1)
    means = [side.means() for side in sides]
    tile.end(means[0], means[1], 0, {budget: draw.text for budget, draw in draws.items()})
    for side, mean in zip(sides, means, strict=True):
        side.end(mean, draws)
    return tile
