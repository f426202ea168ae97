"""First and second moments of paired rows: all that a closed-form map or a linear measure needs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Moments", "merge_moments", "moments_of"]


class Moments(NamedTuple):
    """Centred second moments of n paired rows at S site pairs, in float64.

    Attributes:
        n: number of rows, ().
        mean_x: (S, d_x), mean_y: (S, d_y).
        xx: Σ (x − x̄)(x − x̄)ᵀ, (S, d_x, d_x); yy: (S, d_y, d_y); xy: Σ (x − x̄)(y − ȳ)ᵀ, (S, d_x, d_y).
    """

    n: Tensor
    mean_x: Tensor
    mean_y: Tensor
    xx: Tensor
    yy: Tensor
    xy: Tensor

    def swap(self) -> Moments:
        """The moments of the pairs (y, x): what a map from Y to X is fitted on."""
        return Moments(self.n, self.mean_y, self.mean_x, self.yy, self.xx, self.xy.mT)


def moments_of(x: Tensor, y: Tensor) -> Moments:
    """Moments of one batch of paired rows.

    Args:
        x: (S, N, d_x) states of X.
        y: (S, N, d_y) states of Y, row by row the partners of `x`.
    """
    x, y = x.double(), y.double()
    mean_x, mean_y = x.mean(1), y.mean(1)
    x, y = x - mean_x[:, None], y - mean_y[:, None]
    n = torch.tensor(float(x.shape[1]), dtype=torch.float64, device=x.device)
    return Moments(n, mean_x, mean_y, x.mT @ x, y.mT @ y, x.mT @ y)


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Moments of the union of two disjoint sets of rows.

    Centred moments are merged, not raw ones, so that a mean which dwarfs its deviation does not cancel
    (Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance").
    """
    n = a.n + b.n
    share = b.n / n.clamp(min=1)
    dx, dy = b.mean_x - a.mean_x, b.mean_y - a.mean_y
    weight = a.n * share
    return Moments(
        n,
        a.mean_x + share * dx,
        a.mean_y + share * dy,
        a.xx + b.xx + weight * dx[:, :, None] * dx[:, None, :],
        a.yy + b.yy + weight * dy[:, :, None] * dy[:, None, :],
        a.xy + b.xy + weight * dx[:, :, None] * dy[:, None, :],
    )
