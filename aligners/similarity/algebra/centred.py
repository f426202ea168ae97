"""Rows less their mean, in float64: all at once, or a block at a time where a copy of all would be too large."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CentredRows", "centred"]


def centred(x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows less their mean, and the mean: x (L, N, d) → (L, N, d), (L, 1, d).

    Rounding can move the mean of a constant away from it. Clamped to the range of the rows it is that constant, and
    constant features become exact zeros.
    """
    mean = x.mean(1, keepdim=True).clamp(x.amin(1, keepdim=True), x.amax(1, keepdim=True))
    return x - mean, mean


class CentredRows:
    """Rows (L, N, d) of any precision, read as w_i, float64 rows less their mean c, some of them at a time.

    `rows[:, some]` is (L, n, d), as of a tensor.

    Args:
        x: (L, N, d).
        of_length_one: scale each row to length 1 first.

    Attributes:
        along: c·w_i, (L, N).
        squares: the mean over rows of ‖x_i‖², (L,).
    """

    dtype = torch.float64

    def __init__(self, x: Tensor, of_length_one: bool = False) -> None:
        self._x, self._of_length_one = x, of_length_one
        self.shape, self.device = x.shape, x.device
        means, along, squares = [], [], []
        for layer in x.split(1):  # one at a time, for the memory
            rows = self._scaled(layer)
            squares.append(torch.linalg.vecdot(rows, rows).mean())
            from_mean, mean = centred(rows)
            along.append((from_mean @ mean.mT)[0, :, 0])
            means.append(mean)
        self._mean, self.along, self.squares = torch.cat(means), torch.stack(along), torch.stack(squares)

    def __len__(self) -> int:
        """L."""
        return len(self._x)

    def __getitem__(self, at: tuple[slice, slice]) -> Tensor:
        """Some layers and some rows."""
        return self._scaled(self._x[at]).sub_(self._mean[at[0]])

    def _scaled(self, rows: Tensor) -> Tensor:
        rows = rows.to(torch.float64, copy=True)
        return rows.div_(torch.linalg.vector_norm(rows, dim=2, keepdim=True)) if self._of_length_one else rows
