"""What a fit explains of unrelated data by chance, because it has few rows for its directions."""

from __future__ import annotations

from torch import Tensor

from aligners.similarity.algebra.moments import GridMoments
from aligners.similarity.functional.canonical import whitening

__all__ = ["MOST_BY_CHANCE", "canonical_chance", "regression_chance"]

MOST_BY_CHANCE = 0.1  # ten rows a direction; above it values of fitted measures carry a caution


def regression_chance(moments: GridMoments) -> Tensor:
    """E[R²] of regressing an independent X on all of Y: d_y / (n − 1), at most 1, (L_x, L_y).

    Centred rows span n − 1 dimensions, Y's features d_y of them, and an independent X lies in such a subspace with that
    share of its squared length on average, whatever its distribution. A multiple correlation is about its root.
    """
    return _share(moments, moments.yy.new_tensor(moments.yy.shape[-1]))


def canonical_chance(moments: GridMoments, share: float = 1.0) -> Tensor:
    """Mean ρ² of the canonical correlations of independent X and Y: max(k_x, k_y) / (n − 1), at most 1, (L_x, L_y).

    The ρ² add up to tr(P_X P_Y), whose mean is k_x k_y / (n − 1) by the same argument, over min(k_x, k_y) of them. Mean
    correlations are at most the root of it, weighted by what they account for or not.

    Args:
        moments: of the rows.
        share: of the variance that the k_x and k_y directions carry; 1: all features.
    """
    if share == 1:
        return _share(moments, moments.yy.new_tensor(max(moments.xx.shape[-1], moments.yy.shape[-1])))
    kept_x, kept_y = (whitening(scatter, share=share).rank for scatter in (moments.xx, moments.yy))
    return _share(moments, kept_x[:, None].maximum(kept_y))


def _share(moments: GridMoments, directions: Tensor) -> Tensor:
    return (directions / (moments.n - 1)).clamp(max=1).expand(len(moments.xx), len(moments.yy))
