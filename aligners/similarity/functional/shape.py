"""Shape measures: what is left of the difference between two layers once one is turned onto the other.

Everything follows from the nuclear norm ‖XᵀY‖_* of centred rows, which is tr((K_X^½ K_Y K_X^½)^½) for K_X = XXᵀ and
K_Y = YYᵀ: the Bures similarity of the Gram matrices and the best rotation of the features are one quantity (Harvey et
al. 2023, "Duality of Bures and shape distances"). Unequal widths are as good as equal ones, the narrower filled with
zeros.
"""

import math

import torch
from torch import Tensor

from aligners.similarity.algebra.grid import of_moments
from aligners.similarity.algebra.moments import (
    GridMoments,
    by_tile,
    check_moments,
    decomposed,
    squares,
)


@of_moments
def nbs(moments: GridMoments) -> Tensor:
    """Normalised Bures similarity, ‖XᵀY‖_* / (‖X‖ ‖Y‖), for all layer pairs (Tang et al. 2020; Harvey et al. 2023).

    The cosine between the rows of X, turned as they fit best, and those of Y. In [0, 1] and symmetric. Invariant to
    rotation, isotropic scaling and translation of either side. Biased upwards where rows are few for the width.

    Route: feature side, the singular values of one d_x × d_y matrix a pair.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: fewer than 2 rows, non-finite rows, a layer in which nothing varies, or a decomposition that does
            not converge.
    """
    norm, total_x, total_y = _norms(moments, "Bures similarity")
    return norm / (total_x * total_y).sqrt()


@of_moments
def angular_shape(moments: GridMoments) -> Tensor:
    """1 − θ / (π/2) with θ the angular shape distance, for all layer pairs: 1 of equal shapes, 0 of orthogonal ones.

    Symmetric, and invariant to what `nbs` is, of whose arccosine it is made.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: as `nbs`.
    """
    return shape_of(nbs(moments))


def shape_of(cosine: Tensor) -> Tensor:
    """`angular_shape` from `nbs`."""
    return 1 - _angle(cosine) / (math.pi / 2)


def _angle(cosine: Tensor) -> Tensor:
    within = cosine.clamp(max=1)  # rounding may take it above 1
    return within.arccos()


@of_moments
def angular_shape_distance(moments: GridMoments) -> Tensor:
    """θ = arccos(max_Q ⟨XQ, Y⟩ / (‖X‖ ‖Y‖)), Q orthogonal, for all layer pairs (Williams et al. 2021, eq. 7).

    In [0, π/2], in radians; a metric: symmetric, and the triangle inequality holds. Equal to the rotation-invariant
    angular metric of netrep (`LinearMetric(alpha=1)`).

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: as `nbs`.
    """
    return _angle(nbs(moments))


@of_moments
def procrustes_distance(moments: GridMoments, *, scaled: bool = True) -> Tensor:
    """min_Q ‖XQ − Y‖, Q orthogonal, for all layer pairs (Williams et al. 2021; Ding et al. 2021 with `scaled`).

    A metric. Invariant to rotation and translation of either side, and with `scaled` to one scale. Without it, it is
    the Bures distance of the Gram matrices, in the units of the states, and grows with √n.

    Args:
        moments: moments of the rows.
        scaled: divide the centred rows of each side by their norm: √(2 − 2 nbs), in [0, √2].

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: as `nbs`.
    """
    norm, total_x, total_y = _norms(moments, "Procrustes distance")
    if scaled:
        norm = norm / (total_x * total_y).sqrt()
        total_x = torch.ones_like(total_x)
        total_y = torch.ones_like(total_y)
    square = total_x + total_y - 2 * norm
    return square.clamp(min=0).sqrt()  # rounding may take it below 0


def _norms(moments: GridMoments, measure: str) -> tuple[Tensor, Tensor, Tensor]:
    """‖XᵀY‖_* (L_x, L_y), and ‖X‖² (L_x, 1) and ‖Y‖² (L_y,)."""
    check_moments(moments, measure, 2, x="layers", y="layers")

    def of_tile(i: int, some: slice, xy: Tensor) -> Tensor:
        values = decomposed(f"SVD for {measure}", torch.linalg.svdvals, xy)
        return values.sum(-1)

    total_x = squares(moments.xx).sum(-1)
    total_y = squares(moments.yy).sum(-1)
    return by_tile(moments, of_tile), total_x[:, None], total_y
