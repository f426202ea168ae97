"""Solvers from moments: least squares, ridge regression, the orthogonal map, and a thin SVD free of rounding."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.similarity.algebra.moments import Moments, constant_features, squares

# A neuron whose deviation is below this share of its mean's size is constant but for rounding; a residual below this
# share of all squares is zero but for rounding.
ROUNDING = 1e-12
# Singular values below this share of the largest are zero but for rounding.
NULL = 1e-10
RIDGES = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)
STRENGTHS = (
    *(1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    *(0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0, 1e4),
)


class OneSize(NamedTuple):
    """Moments of states whose features are divided by sizes, so that a ridge asks the same of each.

    The size of a feature is the root of its sum of squares. Language models have features of up to 10,000 times the
    size of the others: a ridge in proportion to the mean of all would leave only those.

    Attributes:
        sizes: (S, d_x) of the features.
        moments: of the divided states; zero where a feature does not vary.
    """

    sizes: Tensor
    moments: Moments

    @classmethod
    def of(cls, moments: Moments, common: bool = False) -> Self:
        """Divide X's features by their own sizes; `common`: by the root of the mean square of these."""
        variance = squares(moments.xx)
        constant = constant_features(variance / moments.n, moments.mean_x)
        if common:
            variance = variance.mean(-1, keepdim=True).expand_as(variance)
        sizes = torch.where(constant, 1.0, variance.sqrt())
        return cls(sizes, cls(sizes, moments).divided(moments, ~constant))

    def divided(self, moments: Moments, varies: Tensor | None = None) -> Moments:
        """Moments of other rows with X's features divided by the same sizes; zero where `varies` says no."""
        factor = 1 / self.sizes
        if varies is not None:
            factor = factor * varies
        xx = moments.xx * factor[:, :, None] * factor[:, None]
        return moments._replace(
            mean_x=moments.mean_x * factor, xx=xx, xy=moments.xy * factor[..., None]
        )

    def undone(self, weight: Tensor) -> Tensor:
        """Turn a map (S, d_x, d_y) of the divided states into one of the states."""
        return weight / self.sizes[..., None]


def least_squares(moments: Moments, ridge: float) -> Tensor:
    """argmin_W ‖XW − Y‖² + `ridge` · Σ_i ‖X_i‖² ‖W_i‖² on centred rows, (S, d_x, d_y).

    X_i is a feature of X, W_i its row of W: each is penalised by its own scale, as if X were standardised.

    Raises:
        ValueError: the system cannot be solved (constant or non-finite states).
    """
    alike = OneSize.of(moments)
    system = alike.moments.xx
    same = torch.eye(system.shape[-1], dtype=torch.float64, device=system.device)
    factor, failed = torch.linalg.cholesky_ex(system + ridge * same)
    failed = (failed != 0) | (squares(system) == 0).all(-1)
    if failed.any():
        raise UserError(
            "Least squares expects states of X that vary in every direction or a positive `ridge`; "
            f"the system of site pair number {int(failed.nonzero()[0])} is singular at ridge {ridge:g}. "
            "Leave that site out where X's states are constant (site 0 with `rows` 'cls'); elsewhere raise `ridge`."
        )
    return alike.undone(torch.cholesky_solve(alike.moments.xy, factor))


def ridge_regression(
    moments: Moments, ridges: Sequence[float], validation: Moments | None = None
) -> tuple[Tensor, Tensor]:
    """Least squares of each site under the ridge with the least error on other rows, however few the fitting rows.

    Each ridge is tried in two ways: relative to each feature's own variance, as in `least_squares`, and relative to the
    mean of all. The first holds whatever the features' scales; where these differ little and rows are few, the second
    has the lower error, as large features tell more.

    One eigendecomposition serves all ridges, and the error on validation rows follows from their moments.
    Without these the criterion is that of generalised cross-validation (Golub, Heath and Wahba 1979): residual / (n − 1
    − degrees of freedom)². It takes rows for independent, and chooses too small a ridge where those of one text are
    alike.

    Args:
        moments: of the fitting rows.
        ridges: to choose from.
        validation: moments of other rows, of the same sites.

    Returns:
        W (S, d_x, d_y), and the ridge of each site, (S,).
    """
    own = _ridge_regression(OneSize.of(moments), ridges, validation)
    common = _ridge_regression(OneSize.of(moments, common=True), ridges, validation)
    better = common.error < own.error
    weight = torch.where(better[:, None, None], common.weight, own.weight)
    return weight, torch.where(better, common.ridge, own.ridge)


class _Regression(NamedTuple):
    """W (S, d_x, d_y), its ridge (S,), and the error by which it was chosen (S,)."""

    weight: Tensor
    ridge: Tensor
    error: Tensor


def _ridge_regression(
    alike: OneSize, ridges: Sequence[float], validation: Moments | None
) -> _Regression:
    """`ridge_regression` under one way of penalising."""
    moments = alike.moments
    values, vectors = torch.linalg.eigh(moments.xx)
    level = values.mean(-1, keepdim=True)
    varies = values > 1e-12 * level
    values = torch.where(varies, values, level)
    projected = vectors.mT @ moments.xy * varies[..., None]
    added = torch.tensor(list(ridges), dtype=values.dtype, device=values.device)
    shrinking = added[:, None, None] * level
    kept, lost = values / (values + shrinking), shrinking / (values + shrinking)
    if validation is not None:
        error = _error_on(
            alike.divided(validation), moments, vectors, projected, kept / values
        )
    else:
        explained = projected.square().sum(-1) / values
        total = squares(moments.yy).sum(-1, keepdim=True)
        outside = total - explained.sum(-1, keepdim=True)
        outside = torch.where(
            outside > ROUNDING * total, outside, 0.0
        )  # fewer rows than directions explain everything
        residual = outside + (explained * lost.square()).sum(-1, keepdim=True)
        left = (
            moments.n
            - 1
            - varies.sum(-1, keepdim=True)
            + (lost * varies).sum(-1, keepdim=True)
        )
        error = torch.where(left > 0, residual / left.square(), torch.inf)[..., 0]
    least = error.min(0)
    kept = kept[least.indices, torch.arange(len(level), device=level.device)]
    weight = alike.undone(vectors @ (projected * (kept / values)[..., None]))
    return _Regression(weight, added[least.indices], least.values)


def ridge_path(
    moments: Moments,
    ridges: Sequence[float],
    towards: Tensor | None = None,
    common: bool = False,
) -> Iterator[Tensor]:
    """The maps of ridge regression under each ridge in turn; one eigendecomposition serves all.

    Args:
        moments: of the fitting rows.
        ridges: relative to each feature's own variance; `common`: to the mean of all.
        towards: W₀ (d_x, d_y); the penalty is then on W − W₀. Default: 0.
        common: see `ridge_regression`.

    Yields:
        W (S, d_x, d_y).
    """
    alike = OneSize.of(moments, common)
    values, vectors = torch.linalg.eigh(alike.moments.xx)
    level = values.mean(-1, keepdim=True)[..., None]
    cross = alike.moments.xy
    if towards is not None:
        cross = cross - alike.moments.xx * alike.sizes[:, None] @ towards
    projected = vectors.mT @ cross
    values = values.clamp(min=0)[..., None]
    for ridge in ridges:
        weight = alike.undone(vectors @ (projected / (values + ridge * level)))
        yield weight if towards is None else weight + towards


def _error_on(
    validation: Moments,
    moments: Moments,
    vectors: Tensor,
    projected: Tensor,
    factors: Tensor,
) -> Tensor:
    """‖Y − X W‖² on validation rows about the fitting rows' means, less what all W share, (R, S).

    Args:
        moments: of the fitting rows.
        validation: of the validation rows.
        vectors: (S, d_x, d_x) V.
        projected: (S, d_x, d_y) P.
        factors: (R, S, d_x) f of R maps W = V diag(f) P.
    """
    shift_x, shift_y = (
        validation.mean_x - moments.mean_x,
        validation.mean_y - moments.mean_y,
    )
    xx = validation.xx + validation.n * shift_x[:, :, None] * shift_x[:, None]
    xy = validation.xy + validation.n * shift_x[:, :, None] * shift_y[:, None]
    squares = vectors.mT @ xx @ vectors * (projected @ projected.mT)
    products = (vectors.mT @ xy * projected).sum(-1)
    quadratic = torch.einsum("rsi,sij->rsj", factors, squares) * factors
    return (quadratic - 2 * products * factors).sum(-1)


def procrustes_rotation(moments: Moments) -> tuple[Tensor, Tensor]:
    """Argmin ‖XR − Y‖ over (semi-)orthogonal R: U Vᵀ of the SVD of XᵀY (Schönemann 1966).

    The rows leave R open where singular values of XᵀY are zero, as with fewer rows than neurons: see
    `determined_svd`.

    Returns:
        R (S, d_x, d_y), and the singular values of XᵀY (S, min(d_x, d_y)).
    """
    u, s, vh = determined_svd(moments.xy)
    return u @ vh, s


def determined_svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A thin SVD whose U Vᵀ does not depend on rounding where singular values are zero.

    Every pairing of the null spaces' directions has the same product U S Vᵀ, and rounding would choose one of them.
    This function takes the one whose U Vᵀ is nearest to the identity: what the matrix says nothing about stays put.

    Args:
        matrix: (S, d_x, d_y).

    Returns:
        U (S, d_x, c), singular values (S, c), descending, and Vᵀ (S, c, d_y), for c = min(d_x, d_y).
    """
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    known = s > NULL * s[:, :1]
    if known.all():
        return u, s, vh
    of_u, of_v = u * known[:, None], vh * known[..., None]
    rest = torch.eye(*matrix.shape[-2:], dtype=u.dtype, device=u.device)
    rest = rest - of_u @ (of_u.mT @ rest)
    rest = rest - (rest @ of_v.mT) @ of_v
    null_u, _, null_v = torch.linalg.svd(rest, full_matrices=False)
    place = (
        torch.arange(s.shape[-1], device=s.device) - known.sum(-1, keepdim=True)
    ).clamp(min=0)
    null_u, null_v = (
        null_u.take_along_dim(place[:, None], 2),
        null_v.take_along_dim(place[..., None], 1),
    )
    return (
        torch.where(known[:, None], u, null_u),
        s,
        torch.where(known[..., None], vh, null_v),
    )


def deviations(
    moments: Moments, *, constant_neurons: bool = False
) -> tuple[Tensor, Tensor]:
    """Standard deviation of every neuron of X (S, d_x) and of Y (S, d_y).

    Args:
        moments: of the fitting rows.
        constant_neurons: allow constant neurons, unless all of a site are.

    Raises:
        ValueError: a neuron, or all of a site, is constant over the rows or not finite.
    """
    both = []
    for name, mean, scatter in (
        ("X", moments.mean_x, moments.xx),
        ("Y", moments.mean_y, moments.yy),
    ):
        deviation = (squares(scatter) / moments.n).sqrt()
        constant = ~(deviation > ROUNDING * mean.abs())  # also true of NaN
        bad = (
            (constant.all(-1) | ~deviation.isfinite().all(-1))
            if constant_neurons
            else constant.any(-1)
        )
        if bad.any():
            site = int(bad.nonzero()[0])
            raise UserError(
                f"Expected {'states' if constant_neurons else 'every neuron'} of {name} to vary over the fitting rows, "
                f"but {int(constant[site].sum())} of {constant.shape[-1]} neurons are constant or not finite at site "
                f"pair number {site}. Leave that site out (site 0 with `rows` 'cls'), or this map."
            )
        both.append(deviation)
    return both[0], both[1]
