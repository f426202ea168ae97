"""Maps with a closed form: identity, mean, least squares, ridge regression, orthogonal Procrustes."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from aligners.errors import UserError, check_range
from aligners.maps.base import Aligner
from aligners.similarity.algebra.moments import Moments, squares

# A neuron whose deviation is below this share of its mean's size is constant but for rounding; a residual below this
# share of all squares is zero but for rounding.
ROUNDING = 1e-12
# Singular values below this share of the largest are zero but for rounding.
NULL = 1e-10
RIDGES = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
STRENGTHS = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)


def least_squares(moments: Moments, ridge: float) -> Tensor:
    """argmin_W ‖XW − Y‖² + λ‖W‖² on centred rows, (S, d_x, d_y), with λ = `ridge` · tr(XᵀX)/d_x.

    Raises:
        ValueError: the system cannot be solved (constant or non-finite states).
    """
    d = moments.xx.shape[-1]
    weight = ridge * squares(moments.xx).mean(-1)
    system = moments.xx + weight[:, None, None] * torch.eye(d, dtype=torch.float64, device=weight.device)
    factor, failed = torch.linalg.cholesky_ex(system)
    if failed.any():
        raise UserError(
            "Least squares expects states of X that vary in every direction or a positive `ridge`; "
            f"the system of site pair number {int(failed.nonzero()[0])} is singular at ridge {ridge:g}. "
            "Leave that site out where X's states are constant (site 0 with `rows` 'cls'); elsewhere raise `ridge`."
        )
    return torch.cholesky_solve(moments.xy, factor)


def ridge_regression(
    moments: Moments, ridges: Sequence[float], validation: Moments | None = None
) -> tuple[Tensor, Tensor]:
    """Least squares of each site under the ridge with the least error on other rows, however few the fitting rows.

    One eigendecomposition of XᵀX serves all ridges, and the error on validation rows follows from their moments.
    Without these the criterion is that of generalised cross-validation (Golub, Heath and Wahba 1979): residual / (n − 1
    − degrees of freedom)². It takes rows for independent, and chooses too small a ridge where those of one text are
    alike.

    Args:
        moments: of the fitting rows.
        ridges: to choose from, relative to tr(XᵀX)/d_x.
        validation: moments of other rows, of the same sites.

    Returns:
        W (S, d_x, d_y), and the ridge of each site, (S,).
    """
    values, vectors = torch.linalg.eigh(moments.xx)
    level = values.mean(-1, keepdim=True)
    varies = values > 1e-12 * level
    values = torch.where(varies, values, level)
    projected = vectors.mT @ moments.xy * varies[..., None]
    choice = torch.tensor(list(ridges), dtype=values.dtype, device=values.device)
    added = choice[:, None, None] * level
    kept, lost = values / (values + added), added / (values + added)
    if validation is not None:
        error = _error_on(validation, moments, vectors, projected, kept / values)
    else:
        explained = projected.square().sum(-1) / values
        total = squares(moments.yy).sum(-1, keepdim=True)
        outside = total - explained.sum(-1, keepdim=True)
        outside = torch.where(outside > ROUNDING * total, outside, 0.0)  # fewer rows than directions explain everything
        residual = outside + (explained * lost.square()).sum(-1, keepdim=True)
        left = moments.n - 1 - varies.sum(-1, keepdim=True) + (lost * varies).sum(-1, keepdim=True)
        error = torch.where(left > 0, residual / left.square(), torch.inf)[..., 0]
    best = error.argmin(0)
    kept = kept[best, torch.arange(len(best), device=best.device)]
    return vectors @ (projected * (kept / values)[..., None]), choice[best]


def _error_on(validation: Moments, moments: Moments, vectors: Tensor, projected: Tensor, factors: Tensor) -> Tensor:
    """‖Y − X W‖² on validation rows about the fitting rows' means, less what all W share, (R, S).

    Args:
        moments: of the fitting rows.
        validation: of the validation rows.
        vectors: (S, d_x, d_x) V.
        projected: (S, d_x, d_y) P.
        factors: (R, S, d_x) f of R maps W = V diag(f) P.
    """
    shift_x, shift_y = validation.mean_x - moments.mean_x, validation.mean_y - moments.mean_y
    xx = validation.xx + validation.n * shift_x[:, :, None] * shift_x[:, None]
    xy = validation.xy + validation.n * shift_x[:, :, None] * shift_y[:, None]
    squares = vectors.mT @ xx @ vectors * (projected @ projected.mT)
    products = (vectors.mT @ xy * projected).sum(-1)
    return ((factors[..., None, :] @ squares)[..., 0, :] * factors - 2 * products * factors).sum(-1)


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
    place = (torch.arange(s.shape[-1], device=s.device) - known.sum(-1, keepdim=True)).clamp(min=0)
    null_u, null_v = null_u.take_along_dim(place[:, None], 2), null_v.take_along_dim(place[..., None], 1)
    return torch.where(known[:, None], u, null_u), s, torch.where(known[..., None], vh, null_v)


def deviations(moments: Moments, *, constant_neurons: bool = False) -> tuple[Tensor, Tensor]:
    """Standard deviation of every neuron of X (S, d_x) and of Y (S, d_y).

    Args:
        moments: of the fitting rows.
        constant_neurons: allow constant neurons, unless all of a site are.

    Raises:
        ValueError: a neuron, or all of a site, is constant over the rows or not finite.
    """
    both = []
    for name, mean, scatter in (("X", moments.mean_x, moments.xx), ("Y", moments.mean_y, moments.yy)):
        deviation = (squares(scatter) / moments.n).sqrt()
        constant = ~(deviation > ROUNDING * mean.abs())  # also true of NaN
        bad = (constant.all(-1) | ~deviation.isfinite().all(-1)) if constant_neurons else constant.any(-1)
        if bad.any():
            site = int(bad.nonzero()[0])
            raise UserError(
                f"Expected {'states' if constant_neurons else 'every neuron'} of {name} to vary over the fitting rows, "
                f"but {int(constant[site].sum())} of {constant.shape[-1]} neurons are constant or not finite at site "
                f"pair number {site}. Leave that site out (site 0 with `rows` 'cls'), or this map."
            )
        both.append(deviation)
    return both[0], both[1]


class Affine(Aligner):
    """y = (x − x̄) W + ȳ, and back through a pseudo-inverse: the form of every linear closed form.

    A subclass's `fit` passes the matrices of its own definition to `set_map`.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.

    Attributes:
        figures: what a fit leaves behind besides the map: buffers by name, of this shape at each site, NaN before.
    """

    figures: ClassVar[Mapping[str, tuple[int, ...]]] = {}
    closed_form = True
    mean_x: Tensor
    mean_y: Tensor
    weight: Tensor
    weight_back: Tensor

    def __init__(self, sites: int, d_x: int, d_y: int) -> None:
        super().__init__(sites, d_x, d_y)
        self.register_buffer("mean_x", torch.zeros(sites, 1, d_x))
        self.register_buffer("mean_y", torch.zeros(sites, 1, d_y))
        self.register_buffer("weight", torch.zeros(sites, d_x, d_y))
        self.register_buffer("weight_back", torch.zeros(sites, d_y, d_x))
        for name, shape in self.figures.items():
            self.register_buffer(name, torch.full((sites, *shape), torch.nan))

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d_x) -> (S, N, d_y)."""
        return torch.baddbmm(self.mean_y, x - self.mean_x, self.weight)

    def inverse(self, y: Tensor) -> Tensor:
        """(S, N, d_y) -> (S, N, d_x)."""
        if not self.invertible:
            return super().inverse(y)
        return torch.baddbmm(self.mean_x, y - self.mean_y, self.weight_back)

    def set_map(self, moments: Moments, weight: Tensor, weight_back: Tensor | None = None) -> None:
        """Set W (S, d_x, d_y), the inverse (S, d_y, d_x) if there is one, and the means of the fitting rows."""
        self.mean_x.copy_(moments.mean_x[:, None])
        self.mean_y.copy_(moments.mean_y[:, None])
        self.weight.copy_(weight)
        if weight_back is not None:
            self.weight_back.copy_(weight_back)


class Linear(Affine):
    """Least squares with an intercept (Ren et al. §3.3; Wu et al. A.2).

    Its inverse goes through the pseudo-inverse of W. It is exact only where W has full rank, which it never has for
    states after a LayerNorm, so the map is called invertible and not bijective.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        ridge: λ relative to the mean variance of X, tr(XᵀX)/d_x.
        inverse_tolerance: singular values of W below this share of the largest are dropped by the inverse.

    Attributes:
        condition: (S,) largest over smallest singular value of W.
    """

    figures: ClassVar = {"condition": ()}
    condition: Tensor

    def __init__(self, sites: int, d_x: int, d_y: int, *, ridge: float = 1e-6, inverse_tolerance: float = 1e-6) -> None:
        super().__init__(sites, d_x, d_y)
        check_range(least=0, ridge=ridge)
        self.ridge, self.inverse_tolerance = ridge, inverse_tolerance
        self.invertible = d_x == d_y
        self.rows_needed = d_x + 1  # one more than there are unknowns for each output

    def fit(self, moments: Moments) -> None:
        """Solve from moments, in float64."""
        weight = least_squares(moments, self.ridge)
        singular = torch.linalg.svdvals(weight)
        self.condition.copy_(singular[:, 0] / singular[:, -1])
        self.set_map(moments, weight, torch.linalg.pinv(weight, rtol=self.inverse_tolerance))

    def findings(self) -> dict[str, Any]:
        """The condition number of W at each site: how far its inverse can be trusted."""
        return {"condition_number": self.condition.tolist()}


class Ridge(Affine):
    """Ridge regression with an intercept: least squares that shrinks, by as much as other rows ask for.

    The baseline where rows are few: least squares itself is worthless at as many rows as dimensions. The strength
    of each site is chosen by the error on validation rows, or, without any, by generalised cross-validation: see
    `ridge_regression`. It is a regression, and the way back is a different regression: the map has no inverse.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.

    Attributes:
        ridge: (S,) the strength that was chosen out of `STRENGTHS`: λ relative to the mean variance of X, tr(XᵀX)/d_x.
        validation_rows: (S,) the number of rows that chose it; 0: generalised cross-validation.
    """

    figures: ClassVar = {"ridge": (), "validation_rows": ()}
    ridge: Tensor
    validation_rows: Tensor

    def fit(self, moments: Moments, validation: Moments | None = None) -> None:
        """Solve from the moments of the fitting rows, and of validation rows if there are any, in float64.

        Raises:
            ValueError: the states of a site are constant or not finite.
        """
        deviations(moments, constant_neurons=True)
        weight, ridge = ridge_regression(moments, STRENGTHS, validation)
        self.ridge.copy_(ridge)
        self.validation_rows.fill_(0 if validation is None else int(validation.n))
        self.set_map(moments, weight)

    def findings(self) -> dict[str, Any]:
        """The strength at each site, and what chose it."""
        rows = int(self.validation_rows.max())
        chosen = f"{rows} validation rows" if rows else "generalised cross-validation on the fitting rows"
        return {"ridge": [float(f"{value:.3g}") for value in self.ridge.tolist()], "ridge_chosen_by": chosen}


class Procrustes(Affine):
    """Rotation (or reflection) of the centred states, with one scale if asked for (Schönemann 1966).

    Bijective at equal widths. At unequal widths R is semi-orthogonal: into the wider space and back is exact; into the
    narrower one, what lies outside its range is lost.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        scale: also fit one factor per site, tr(Σ)/tr(XᵀX) with Σ the singular values of XᵀY.
    """

    invertible = True

    def __init__(self, sites: int, d_x: int, d_y: int, *, scale: bool = False) -> None:
        super().__init__(sites, d_x, d_y)
        self.bijective = d_x == d_y
        self.scale = scale

    def fit(self, moments: Moments) -> None:
        """Solve from moments, in float64."""
        rotation, singular = procrustes_rotation(moments)
        factor = singular.sum(-1) / squares(moments.xx).sum(-1) if self.scale else torch.ones_like(singular[:, 0])
        factor = factor[:, None, None]
        self.set_map(moments, rotation * factor, rotation.mT / factor)


class Mean(Aligner):
    """The mean of Y's states, whatever x is: the floor, with FVU 1 on the fitting rows."""

    closed_form = True
    mean_y: Tensor

    def __init__(self, sites: int, d_x: int, d_y: int) -> None:
        super().__init__(sites, d_x, d_y)
        self.register_buffer("mean_y", torch.zeros(sites, 1, d_y))

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d_x) -> (S, N, d_y)."""
        return self.mean_y.expand(-1, x.shape[1], -1)

    def fit(self, moments: Moments) -> None:
        """Take Y's mean."""
        self.mean_y.copy_(moments.mean_y[:, None])


class Identity(Aligner):
    """x as it is: the identity stitching of Brown et al. (§4), and the control that shows what aligning adds."""

    bijective = invertible = True
    closed_form = True
    needs_equal_width = True

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d) -> (S, N, d)."""
        return x

    def inverse(self, y: Tensor) -> Tensor:
        """(S, N, d) -> (S, N, d)."""
        return y

    def fit(self, moments: Moments) -> None:
        """Nothing to fit."""
