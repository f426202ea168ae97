"""Computes on the grid of all layer pairs a tile at a time, so that no copy of the grid is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from aligners.similarity.algebra.moments import GridMoments

__all__ = ["TILE", "by_tile"]

TILE = 2**22  # bytes of cross moments: small compared with most comparisons, large enough for a batch of decompositions


def by_tile(moments: GridMoments, compute: Callable[[int, slice, Tensor], Tensor]) -> Tensor:
    """A function of layer pairs, for all of them.

    Args:
        moments: of the grid.
        compute: from the number i of a layer of X, some layers of Y, and the cross moments of these pairs
            (J, d_x, d_y), to (J, ...).

    Returns:
        (L_x, L_y, ...).
    """
    return torch.stack([torch.cat([compute(*tile) for tile in row]) for row in _rows(moments.xy)])


def _rows(xy: Tensor) -> Iterator[Iterator[tuple[int, slice, Tensor]]]:
    pairs = max(1, TILE // (xy.shape[2] * xy.shape[3] * xy.element_size()))
    for i, row in enumerate(xy):
        yield ((i, slice(j, j + pairs), row[j : j + pairs].contiguous()) for j in range(0, len(row), pairs))
