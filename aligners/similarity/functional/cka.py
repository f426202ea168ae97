"""Linear CKA, biased and unbiased, of all layer pairs."""

from __future__ import annotations

from torch import Tensor

from aligners.errors import UserError
from aligners.similarity.algebra.checks import check_moments
from aligners.similarity.algebra.grid import of_moments
from aligners.similarity.algebra.moments import GridMoments, by_tile


@of_moments
def linear_cka(moments: GridMoments) -> Tensor:
    """‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖) of centred rows (Kornblith et al. 2019, Table 1; Brown et al., eq. 1).

    In [0, 1], symmetric, and invariant to rotations, to one factor for all features and to translation. Biased
    upwards where rows are few for the width. Feature side: the Gram side gives the same number, but is not
    additive over rows.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: non-finite rows, or a layer in which nothing varies.
    """
    check_moments(moments, "Linear CKA", 2, x="layers", y="layers")
    return _cross(moments) / (_squared(moments.xx)[:, None] * _squared(moments.yy)).sqrt()


@of_moments
def unbiased_cka(moments: GridMoments) -> Tensor:
    """HSIC₁(K, L) / √(HSIC₁(K, K) HSIC₁(L, L)) over all rows at once, K = XXᵀ and L = YYᵀ.

    HSIC₁ is the unbiased estimator of Song et al. 2012 (Nguyen et al. 2021, eq. 3), of Gram matrices K̃ and L̃ with
    zeroed diagonals. It does not change when rows are translated, and a K of centred rows sums to zero over each
    row. So (K̃1)_i = −‖x_i‖², 1ᵀK̃L̃1 = Σ‖x_i‖²‖y_i‖² and tr K̃L̃ = ‖XᵀY‖² − Σ‖x_i‖²‖y_i‖²: with quartic sums the
    feature side is exact, in one pass and without any n x n matrix.

    Symmetric, with the invariances of linear CKA. Its expectation for unrelated rows is 0: it may be negative,
    and is returned as it is.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: fewer than 4 rows, non-finite rows, a layer in which nothing varies, or an estimate of HSIC(K, K)
            that is not positive.
    """
    check_moments(moments, "Unbiased CKA", 4, x="layers", y="layers")
    trace_x, trace_y = (scatter.diagonal(dim1=-2, dim2=-1).sum(-1) for scatter in (moments.xx, moments.yy))
    cross = _hsic(moments.n, _cross(moments), moments.q_xy, trace_x[:, None] * trace_y)
    own_x = _hsic(moments.n, _squared(moments.xx), moments.q_xx, trace_x.square())
    own_y = _hsic(moments.n, _squared(moments.yy), moments.q_yy, trace_y.square())
    for name, own, trace in (("x", own_x, trace_x), ("y", own_y, trace_y)):
        refused = ~(own > 1e-12 * trace.square())  # what rounding leaves of 0 is not positive
        if refused.any():
            layers = refused.nonzero()[:, 0].tolist()
            raise UserError(
                f"Unbiased CKA expects a positive HSIC of each layer with itself, but its estimate for `{name}` is not "
                f"in layers {layers}, from {int(moments.n)} rows. Give more rows, or use linear CKA."
            )
    return cross / (own_x[:, None] * own_y).sqrt()


def _cross(moments: GridMoments) -> Tensor:
    """‖XᵀY‖² of all pairs, (L_x, L_y)."""
    return by_tile(moments, lambda i, some, xy: _squared(xy))


def _squared(scatter: Tensor) -> Tensor:
    """Squared Frobenius norm over the last two axes."""
    return scatter.flatten(-2).norm(dim=-1).square()


def _hsic(n: Tensor, squared: Tensor, quartic: Tensor, traces: Tensor) -> Tensor:
    """HSIC₁ times n (n − 3), of centred rows; the factor cancels in a CKA."""
    return squared - quartic + traces / ((n - 1) * (n - 2)) - 2 * quartic / (n - 2)
