"""Solvers from moments: least squares, ridge regression, the orthogonal map, and a thin SVD free of rounding."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.maps.matrices import identity_like, picked
from aligners.similarity.algebra.decompositions import thin_svd
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
    """Moments of states whose features are divided by sizes, so that a ridge shrinks all features alike.

    The size of a feature is the root of its sum of squares. Language models have features of up to 10,000 times the
    size of the others: a ridge in proportion to the mean of all would leave only those.

    Attributes:
        sizes: (S, d_x) of the features.
        moments: moments of the divided states; zero where a feature does not vary.
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
        factor = 1 / sizes * ~constant
        return cls(sizes, _multiplied(moments, factor))

    def divided(self, moments: Moments) -> Moments:
        """Moments of other rows with X's features divided by the same sizes."""
        return _multiplied(moments, 1 / self.sizes)

    def undone(self, weight: Tensor) -> Tensor:
        """Turn a map (S, d_x, d_y) of the divided states into one of the states."""
        return weight / self.sizes[..., None]


def _multiplied(moments: Moments, factor: Tensor) -> Moments:
    """Moments of states whose features of X are multiplied by a factor each, (S, d_x)."""
    rows = factor[:, :, None]
    columns = factor[:, None]
    mean_x = moments.mean_x * factor
    xx = moments.xx * rows * columns
    xy = moments.xy * rows
    return moments._replace(mean_x=mean_x, xx=xx, xy=xy)


def least_squares(moments: Moments, ridge: float) -> Tensor:
    """argmin_W ‖XW − Y‖² + `ridge` · Σ_i ‖X_i‖² ‖W_i‖² on centred rows, (S, d_x, d_y).

    X_i is a feature of X, W_i its row of W: each is penalised by its own scale, as if X were standardised.

    Raises:
        ValueError: the system cannot be solved (constant or non-finite states).
    """
    alike = OneSize.of(moments)
    system = alike.moments.xx
    same = identity_like(system)
    penalised = system + ridge * same
    factor, info = torch.linalg.cholesky_ex(penalised)
    constant = (squares(system) == 0).all(-1)
    failed = (info != 0) | constant
    if failed.any():
        site = _first_site(failed)
        raise UserError(
            "Least squares expects states of X that vary in every direction or a positive `ridge`; "
            f"the system of site pair number {site} is singular at ridge {ridge:g}. "
            "Leave that site out where X's states are constant (site 0 with `rows` 'cls'); elsewhere raise `ridge`."
        )
    weight = torch.cholesky_solve(alike.moments.xy, factor)
    return alike.undone(weight)


def _first_site(failed: Tensor) -> int:
    """The number of the first site pair at which this is true, (S,)."""
    sites = failed.nonzero()
    return int(sites[0])


def ridge_regression(
    moments: Moments, ridges: Sequence[float], validation: Moments | None = None
) -> tuple[Tensor, Tensor]:
    """Solve least squares at each site with the ridge of least error on other rows, however few the fitting rows.

    Each ridge is tried in two ways: relative to each feature's own variance, as in `least_squares`, and relative to the
    mean of all. The first holds whatever the features' scales; where these differ little and rows are few, the second
    has the lower error, as large features tell more.

    One eigendecomposition serves all ridges, and the error on validation rows follows from their moments.
    Without these the criterion is that of generalised cross-validation (Golub, Heath and Wahba 1979): residual / (n − 1
    − degrees of freedom)². It takes rows for independent, and chooses too small a ridge where those of one text are
    alike.

    Args:
        moments: moments of the fitting rows.
        ridges: to choose from.
        validation: moments of other rows, of the same sites.

    Returns:
        W (S, d_x, d_y), and the ridge of each site, (S,).
    """
    own = _best(moments, ridges, validation, common=False)
    common = _best(moments, ridges, validation, common=True)
    better = common.error < own.error
    ridge = torch.where(better, common.ridge, own.ridge)
    better = better[:, None, None]
    weight = torch.where(better, common.weight, own.weight)
    return weight, ridge


class _Regression(NamedTuple):
    """W (S, d_x, d_y), its ridge (S,), and the error by which it was chosen (S,)."""

    weight: Tensor
    ridge: Tensor
    error: Tensor


def _best(
    moments: Moments, ridges: Sequence[float], validation: Moments | None, common: bool
) -> _Regression:
    """The best map under ridges relative to each feature's own variance; `common`: to the mean of all."""
    alike = OneSize.of(moments, common)
    spectrum = _Spectrum(alike)
    return spectrum.best(ridges, validation)


class _Spectrum:
    """Ridge regression under any ridge, from XᵀX = V diag(λ) Vᵀ: W = V diag(kept / λ) P with P = VᵀXᵀY.

    Directions in which X does not vary have P = 0 and, in place of their λ, the mean of all.
    """

    def __init__(self, alike: OneSize) -> None:
        self.alike = alike
        self.moments = alike.moments
        values, self.vectors = torch.linalg.eigh(self.moments.xx)
        self.level = values.mean(-1, keepdim=True)
        self.varies = values > 1e-12 * self.level
        self.values = torch.where(self.varies, values, self.level)
        projected = self.vectors.mT @ self.moments.xy
        self.projected = projected * self.varies[..., None]

    def best(self, ridges: Sequence[float], validation: Moments | None) -> _Regression:
        """The map under the ridge with the least error: see `ridge_regression`."""
        values = self.values
        added = values.new_tensor(list(ridges))
        shrinking = added[:, None, None] * self.level
        both = values + shrinking
        kept = values / both
        if validation is None:
            errors = self._cross_validated(shrinking / both)
        else:
            errors = self._error_on(validation, kept / values)

        error, chosen = errors.min(0)
        taken = picked(kept, chosen)
        factors = taken / values
        shrunk = self.projected * factors[..., None]
        of_alike = self.vectors @ shrunk
        weight = self.alike.undone(of_alike)
        ridge = added[chosen]
        return _Regression(weight, ridge, error)

    def _cross_validated(self, lost: Tensor) -> Tensor:
        """The generalised cross-validation error of R ridges, (R, S), which lose these shares (R, S, d_x) of P."""
        directions = self.varies.sum(-1)
        regained = (lost * self.varies).sum(-1)
        freedom = self.moments.n - 1
        left = freedom - directions + regained
        residual = self._residual(lost)
        error = residual / left.square()
        return torch.where(left > 0, error, torch.inf)

    def _residual(self, lost: Tensor) -> Tensor:
        """The squared error on the fitting rows, (R, S), of ridges that lose these shares (R, S, d_x) of P."""
        squared = self.projected.square()
        projected = squared.sum(-1)
        explained = projected / self.values
        variances = squares(self.moments.yy)
        total = variances.sum(-1)
        outside = total - explained.sum(-1)
        # fewer rows than directions explain everything
        more = outside > ROUNDING * total
        outside = torch.where(more, outside, 0.0)
        given_up = explained * lost.square()
        return outside + given_up.sum(-1)

    def _error_on(self, validation: Moments, factors: Tensor) -> Tensor:
        """‖Y − X W‖² on validation rows about the fitting rows' means, less what all W share, (R, S).

        Args:
            validation: of the validation rows.
            factors: (R, S, d_x) f of R maps W = V diag(f) P.
        """
        xx, xy = self._about_means(validation)
        back = self.vectors.mT
        images = self.projected @ self.projected.mT
        turned_xx = back @ xx @ self.vectors
        squared = turned_xx * images
        turned_xy = back @ xy
        shared = turned_xy * self.projected
        products = shared.sum(-1)
        linear = 2 * products * factors
        half = torch.einsum("rsi,sij->rsj", factors, squared)
        quadratic = half * factors
        return (quadratic - linear).sum(-1)

    def _about_means(self, validation: Moments) -> tuple[Tensor, Tensor]:
        """XᵀX and XᵀY of validation rows, divided by sizes, about the fitting rows' means."""
        other = self.alike.divided(validation)
        shift_x = other.mean_x - self.moments.mean_x
        shift_y = other.mean_y - self.moments.mean_y
        total_x = other.n * shift_x
        total_x = total_x[:, :, None]
        xx = other.xx + total_x * shift_x[:, None]
        xy = other.xy + total_x * shift_y[:, None]
        return xx, xy


def ridge_path(
    moments: Moments,
    ridges: Sequence[float],
    towards: Tensor | None = None,
    common: bool = False,
) -> Iterator[Tensor]:
    """The maps of ridge regression under each ridge in turn; one eigendecomposition serves all.

    Args:
        moments: moments of the fitting rows.
        ridges: relative to each feature's own variance; `common`: to the mean of all.
        towards: W₀ (d_x, d_y); the penalty is then on W − W₀. Default: 0.
        common: see `ridge_regression`.

    Yields:
        W (S, d_x, d_y).
    """
    alike = OneSize.of(moments, common)
    system = alike.moments.xx
    values, vectors = torch.linalg.eigh(system)
    level = values.mean(-1, keepdim=True)[..., None]
    values = values.clamp(min=0)[..., None]
    cross = alike.moments.xy
    if towards is not None:
        sizes = alike.sizes[:, None]
        restored = system * sizes
        cross = cross - restored @ towards
    projected = vectors.mT @ cross
    for ridge in ridges:
        penalised = values + ridge * level
        shrunk = projected / penalised
        weight = alike.undone(vectors @ shrunk)
        if towards is not None:
            weight = weight + towards
        yield weight


def procrustes_rotation(moments: Moments) -> tuple[Tensor, Tensor]:
    """The (semi-)orthogonal R with the least ‖XR − Y‖: U Vᵀ of the SVD of XᵀY (Schönemann 1966).

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
    u, s, vh = thin_svd(matrix)
    known = s > NULL * s[:, :1]
    directions = s.shape[-1]
    counts = known.sum(-1)
    fewest = int(counts.min())
    unknown = directions - fewest
    if unknown == 0:
        return u, s, vh
    if matrix.shape[-2] == matrix.shape[-1]:
        return _paired(u, s, vh, known, unknown)

    known_u = known[:, None]
    known_v = known[..., None]
    only_u = u * known_u
    only_v = vh * known_v
    null_u, null_v = _null_directions(matrix, only_u, only_v)
    # the first of these stands after the last known one
    numbers = torch.arange(directions, device=s.device)
    place = numbers - counts[:, None]
    place = place.clamp(min=0)
    null_u = null_u.take_along_dim(place[:, None], 2)
    null_v = null_v.take_along_dim(place[..., None], 1)
    u = torch.where(known_u, u, null_u)
    vh = torch.where(known_v, vh, null_v)
    return u, s, vh


def _paired(
    u: Tensor, s: Tensor, vh: Tensor, known: Tensor, unknown: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn U's null directions so that U Vᵀ is nearest to the identity: U₀ Q, Q the polar factor of (V₀ᵀ U₀)ᵀ.

    Args:
        u: U (S, d, d), whose last columns span the null space.
        s: singular values.
        vh: Vᵀ (S, d, d), likewise.
        known: (S, d) which directions are none of these.
        unknown: the most there are at a site: as large is the SVD that this takes.
    """
    null = ~known[:, -unknown:]
    null_u = u[..., -unknown:]
    null_v = vh[:, -unknown:]
    both = null[:, :, None] & null[:, None]
    products = null_v @ null_u
    between = torch.where(both, products, identity_like(products))
    left, _, right = thin_svd(between)
    turn = left @ right
    turned = null_u @ turn.mT
    stays = u[..., :-unknown]
    whole = torch.cat([stays, turned], -1)
    return whole, s, vh


def _null_directions(
    matrix: Tensor, known_u: Tensor, known_v: Tensor
) -> tuple[Tensor, Tensor]:
    """The identity's own directions without the known ones, which fill the null spaces of a matrix.

    Args:
        matrix: (S, d_x, d_y).
        known_u: (S, d_x, c), zero where a direction is not known.
        known_v: (S, c, d_y), likewise.

    Returns:
        U (S, d_x, c) and Vᵀ (S, c, d_y).
    """
    rest = identity_like(matrix)
    shares_u = known_u.mT @ rest
    rest = rest - known_u @ shares_u
    shares_v = rest @ known_v.mT
    rest = rest - shares_v @ known_v
    null_u, _, null_v = thin_svd(rest)
    return null_u, null_v


def fixed_direction(like: Tensor) -> Tensor:
    """Return a fixed direction that no data have chosen, cos 1, cos 2, ..., cos d: (d,), for a tensor (..., d)."""
    d = like.shape[-1]
    numbers = torch.arange(1.0, 1 + d, dtype=like.dtype, device=like.device)
    return numbers.cos()


def deviations(
    moments: Moments, *, constant_neurons: bool = False
) -> tuple[Tensor, Tensor]:
    """Standard deviation of every neuron of X (S, d_x) and of Y (S, d_y).

    Args:
        moments: moments of the fitting rows.
        constant_neurons: allow constant neurons, unless all of a site are.

    Raises:
        ValueError: a neuron, or all of a site, is constant over the rows or not finite.
    """
    variance_x = squares(moments.xx) / moments.n
    variance_y = squares(moments.yy) / moments.n
    x = variance_x.sqrt()
    y = variance_y.sqrt()
    _check_vary("X", x, moments.mean_x, constant_neurons)
    _check_vary("Y", y, moments.mean_y, constant_neurons)
    return x, y


def _check_vary(
    name: str, deviation: Tensor, mean: Tensor, constant_neurons: bool
) -> None:
    """Raise if neurons of one model do not vary at a site: all of them, or any unless `constant_neurons`."""
    varies = deviation > ROUNDING * mean.abs()
    constant = ~varies  # also true of NaN
    if constant_neurons:
        what = "states"
        infinite = ~deviation.isfinite()
        bad = constant.all(-1) | infinite.any(-1)
    else:
        what = "every neuron"
        bad = constant.any(-1)
    if not bad.any():
        return
    site = _first_site(bad)
    raise UserError(
        f"Expected {what} of {name} to vary over the fitting rows, but {int(constant[site].sum())} of "
        f"{constant.shape[-1]} neurons are constant or not finite at site pair number {site}. Leave that site out "
        "(site 0 with `rows` 'cls'), or this map."
    )
