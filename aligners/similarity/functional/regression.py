"""How much of X's neurons Y's say, one by one or by linear regression, on fitting rows and on held-out rows."""

import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.similarity.algebra.grid import of_moments
from aligners.similarity.algebra.moments import (
    GridMoments,
    Varying,
    by_tile,
    check_moments,
    squares,
)
from aligners.similarity.functional.canonical_correlations import Whitenings, whitenings


@of_moments
def neuronsim(moments: GridMoments) -> Tensor:
    """Mean over neurons of X of the largest absolute Pearson correlation with a neuron of Y (Wu et al. A.1).

    In [0, 1] and not symmetric. Invariant to permuting neurons, and to translating, scaling and negating each;
    not to rotations. The largest of d_y correlations is biased upwards where rows are few. Feature side.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: fewer than 3 rows (of two every correlation is ±1), non-finite rows, or constant features.
    """
    check_moments(moments, "Neuron similarity", 3, x="features", y="features")
    length_x = squares(moments.xx).sqrt()
    length_y = squares(moments.yy).sqrt()

    def of_tile(i: int, some: slice, xy: Tensor) -> Tensor:
        scaled = xy.abs() / length_y[some, None]
        largest = scaled.amax(-1)
        correlations = largest / length_x[i]
        return correlations.mean(-1)

    return by_tile(moments, of_tile)


@of_moments
def r2(moments: GridMoments, *, white_y: Whitenings | None = None) -> Tensor:
    """‖Q_YᵀX‖² / ‖X‖² of centred rows, Q_Y an orthonormal basis of Y's columns (R²_LR of Ren et al., Table 2).

    The share of X's variance that a least-squares regression on Y explains. In [0, 1] and not symmetric.
    Invariant to any invertible affine map of Y, and to rotations, one factor for all features and translation
    of X. Biased upwards where rows are few for d_y: see `r2_held_out`. Feature side.

    Args:
        moments: moments of the rows.
        white_y: whitenings of Y's layers, if they are known.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: no more rows than Y's rank + 1, non-finite rows, constant features of Y, a layer of X in which
            nothing varies, or a decomposition that does not converge.
    """
    explained = _explained(moments, white_y, "R²", "layers")
    explained = explained.sum(-1)
    total = squares(moments.xx).sum(-1)
    return explained / total[:, None]


@of_moments
def mixedsim(moments: GridMoments, *, white_y: Whitenings | None = None) -> Tensor:
    """Mean over neurons of X of the multiple correlation r of regressing it on all of Y (Wu et al. A.2).

    r is the length of the prediction over that of the centred regressand, the root of that neuron's R². In [0, 1]
    and not symmetric. Invariant to any invertible affine map of Y, and to permuting, translating, scaling and
    negating X's neurons; not to rotating them. Biased upwards where rows are few for d_y. Feature side.

    Args:
        moments: moments of the rows.
        white_y: whitenings of Y's layers, if they are known.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: no more rows than Y's rank + 1, non-finite rows, constant features on either side, or a
            decomposition that does not converge.
    """
    explained = _explained(moments, white_y, "Mixed similarity", "features")
    total = squares(moments.xx)
    share = explained / total[:, None]
    r = share.sqrt()
    return r.mean(-1)


def _explained(
    moments: GridMoments, white_y: Whitenings | None, measure: str, varying: Varying
) -> Tensor:
    """The squares of each neuron of X that a regression on all of Y explains, (L_x, L_y, d_x)."""
    basis = _basis(moments, white_y, measure, varying)

    def of_tile(i: int, some: slice, xy: Tensor) -> Tensor:
        weight = xy @ basis[some]
        return weight.square().sum(-1)

    return by_tile(moments, of_tile)


def r2_held_out(
    fitted: GridMoments, held_out: GridMoments, *, white_y: Whitenings | None = None
) -> Tensor:
    """1 − ‖X − prediction‖² / ‖X − X̄‖² on held-out rows, regression and X̄ from the fitting rows, (L_x, L_y).

    Free of the bias of `r2`; negative where the regression does worse than the mean.

    Raises:
        ValueError: as `r2` for `fitted`; no held-out rows, or a layer of X in which no
            held-out row differs from the mean.
    """
    basis = _basis(fitted, white_y, "R²", "layers")
    check_moments(held_out, "Held-out R²", 1)
    shift_x = held_out.mean_x - fitted.mean_x
    of_shift = held_out.n * shift_x.square()
    squares_x = squares(held_out.xx) + of_shift
    total = squares_x.sum(-1)
    if not (total > 0).all():
        raise UserError(
            "Held-out R² expects rows that differ from the mean of `fitted`, but the "
            f"{int(held_out.n)} rows of `held_out` do not, in a layer of X. Give other rows."
        )
    change = _change(fitted, held_out, basis)
    residual = squares_x[:, None] + change
    residual = residual.sum(-1)
    return 1 - residual / total[:, None]


def _change(fitted: GridMoments, held_out: GridMoments, basis: Tensor) -> Tensor:
    """The squares of each neuron about its fitted mean on held-out rows: what a prediction adds, (L_x, L_y, d_x).

    All sums are about the fitting rows' means: those of the held-out rows come on top as one rank-one term.
    """
    n = held_out.n
    shift_x = held_out.mean_x - fitted.mean_x
    shift_y = held_out.mean_y - fitted.mean_y
    along = shift_y[:, None] @ basis
    along = along[:, 0]
    means = n * along[:, :, None]
    means = means * along[:, None]
    scatter = basis.mT @ held_out.yy @ basis
    scatter = scatter + means

    def of_tile(i: int, some: slice, xy: Tensor) -> Tensor:
        weight = xy @ basis[some]
        cross = held_out.xy[i, some] @ basis[some]
        of_x = n * shift_x[i, :, None]
        cross = cross + of_x * along[some, None]
        products = weight @ scatter[some]
        products = products - 2 * cross
        change = weight * products
        return change.sum(-1)

    return by_tile(fitted, of_tile)


def mixedsim_held_out(
    fitted: GridMoments, held_out: GridMoments, *, white_y: Whitenings | None = None
) -> Tensor:
    """Mean over neurons of X of the Pearson correlation between prediction and regressand on held-out rows, (L_x, L_y).

    The regression of each neuron on all of Y comes from `fitted`, the correlations from `held_out`. On the fitting
    rows this is `mixedsim`; on others a correlation may be negative, and is not clamped.

    Raises:
        ValueError: as `mixedsim` for `fitted`; fewer than 3 held-out rows, or neurons or
            predictions that are constant on them.
    """
    basis = _basis(fitted, white_y, "Mixed similarity", "features")
    check_moments(held_out, "Held-out mixed similarity", 3, x="features")
    covariance, variance = _of_predictions(fitted, held_out, basis)
    constant = ~(variance > 0)
    if constant.any():
        raise UserError(
            "Held-out mixed similarity expects predictions that vary on the rows of `held_out`, but "
            f"{int(constant.sum())} of {constant.numel()} are constant on its {int(held_out.n)} rows. Give more rows."
        )
    total = squares(held_out.xx)
    product = variance * total[:, None]
    r = covariance / product.sqrt()
    return r.mean(-1)


def _of_predictions(
    fitted: GridMoments, held_out: GridMoments, basis: Tensor
) -> tuple[Tensor, Tensor]:
    """Covariance of each neuron of X and its prediction, and variance of this, on held-out rows: (L_x, L_y, d_x)."""
    scatter = basis.mT @ held_out.yy @ basis

    def of_tile(i: int, some: slice, xy: Tensor) -> Tensor:
        weight = xy @ basis[some]
        cross = held_out.xy[i, some] @ basis[some]
        covariance = weight * cross
        predicted = weight @ scatter[some]
        variance = weight * predicted
        sums = covariance.sum(-1), variance.sum(-1)
        return torch.stack(sums, -1)

    both = by_tile(fitted, of_tile)
    covariance, variance = both.unbind(-1)
    return covariance, variance


def _basis(
    moments: GridMoments, white: Whitenings | None, measure: str, varying: Varying
) -> Tensor:
    """W (L_y, d_y, k) with orthonormal columns Q_Y = YW, zero columns beyond a layer's rank.

    XᵀYW = XᵀQ_Y are the coefficients of X's neurons in it. Raises if there is no regression on all of Y.
    """
    check_moments(moments, measure, 3, x=varying, y="features")
    white = white or whitenings(moments.yy)
    basis = white(1.0, False)
    rank = basis.most()
    if moments.n - 1 <= rank:
        d_y = moments.yy.shape[-1]
        raise UserError(
            f"{measure} expects more rows than regressors, at least {d_y + 2} for the {d_y} features of `y`, but "
            f"`moments` hold {int(moments.n)}: any X would be explained completely. Give more rows."
        )
    return basis.in_use()


def localization(neuronsim: Tensor, svsim: Tensor, left_out: Tensor) -> Tensor:
    """Localization score of every layer of X: mean neuronsim less mean svsim to all other layers (Wu et al. §5.1).

    Positive where a layer's similarity to others sits in single neurons rather than in subspaces.

    Args:
        neuronsim: (L, M) of L layers to M others.
        svsim: (L, M), SVCCA of the same pairs.
        left_out: (L, M) boolean, true where the pair is not to count: a layer with itself.

    Returns:
        (L,).

    Raises:
        ValueError: a layer with no other.
    """
    others = (~left_out).sum(-1)
    alone = others == 0
    if alone.any():
        places = alone.nonzero()[:, 0]
        raise UserError(
            f"Expected another layer for every layer, but `left_out` leaves none to {places.tolist()}. Give more "
            "layers or models."
        )
    differences = neuronsim - svsim
    differences = differences.masked_fill(left_out, 0)
    return differences.sum(-1) / others
