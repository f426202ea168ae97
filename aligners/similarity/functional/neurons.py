"""Similarity of single neurons, of all layer pairs."""

from __future__ import annotations

from torch import Tensor

from aligners.similarity.algebra.checks import check_features, check_moments
from aligners.similarity.algebra.grid import grid_moments
from aligners.similarity.algebra.moments import GridMoments
from aligners.similarity.algebra.tiles import by_tile

__all__ = ["neuronsim", "neuronsim_from_moments"]


def neuronsim(x: Tensor, y: Tensor) -> Tensor:
    """Neuron similarity of paired rows: x (L_x, N, d_x), y (L_y, N, d_y) -> (L_x, L_y). See below."""
    return neuronsim_from_moments(grid_moments(x, y))


def neuronsim_from_moments(moments: GridMoments) -> Tensor:
    """Mean over neurons of X of the largest absolute Pearson correlation with a neuron of Y (Wu et al. A.1).

    In [0, 1] and not symmetric. Invariant to permuting neurons, and to translating, scaling and negating each;
    not to rotations. The largest of d_y correlations is biased upwards where rows are few. Feature side.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: fewer than 3 rows (of two every correlation is ±1), non-finite rows, or constant features.
    """
    check_moments(moments, "Neuron similarity", 3)
    check_features(moments, "x", "neuron similarity")
    check_features(moments, "y", "neuron similarity")
    length_x, length_y = (scatter.diagonal(dim1=-2, dim2=-1).sqrt() for scatter in (moments.xx, moments.yy))
    return by_tile(moments, lambda i, some, xy: ((xy.abs() / length_y[some, None]).amax(-1) / length_x[i]).mean(-1))
