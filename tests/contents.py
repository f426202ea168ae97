"""What one pass keeps of two models, from their rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from aligners.similarity.catalogue import Measure
from aligners.similarity.outcome import Content
from aligners.similarity.passes.streams import Shape, Stream
from aligners.similarity.passes.sums import SpanSums, TileSums
from aligners.similarity.sample import Draw

CPU = torch.device("cpu")


def content_of(
    x: Tensor, y: Tensor, measures: Iterable[Measure], weights: Sequence[Tensor] = (), words: Tensor | None = None
) -> Content:
    """What measures are computed from: x (L_x, N, d_x), y (L_y, N, d_y), each row a text; or attention weights."""
    stream, rows = Stream("value", tuple(measures)), torch.arange(x.shape[1])
    blocks = [each.shape[:2] for each in weights] or [(0, 0), (0, 0)]
    shape_x, shape_y = (Shape(len(states), states.shape[2], *own) for states, own in zip((x, y), blocks, strict=True))
    draws = {budget: Draw(budget, 0, CPU) for budget in stream.budgets}
    admitted = {budget: draw.admit(rows, rows) for budget, draw in draws.items()}
    sides = [SpanSums(stream, shape, 1, bool(weights), CPU) for shape in (shape_x, shape_y)]
    tile = TileSums(stream, shape_x, shape_y, [], 1, bool(weights), torch.float64, CPU)
    for side, states in zip(sides, (x, y), strict=True):
        side.update_states(states, 0, admitted)
    tile.update_states(sides[0], sides[1], x, y, 0)
    if words is not None:
        for side, own in zip(sides, weights, strict=True):
            side.update_heads(own, words, 0)
        tile.update_heads(sides[0], sides[1], weights[0], weights[1], words, 0)
    for draw in draws.values():
        draw.end(1)
    moves = [side.moves() for side in sides]
    tile.end(moves[0], moves[1], 0)
    for side, move in zip(sides, moves, strict=True):
        side.end(move, draws)
    return Content(sides[0], sides[1], tile, {budget: draw.text for budget, draw in draws.items()})
