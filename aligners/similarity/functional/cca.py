"""CCA, SVCCA and PWCCA of all layer pairs, on the rows that they are fitted on and on held-out rows."""

from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from aligners.errors import UserError
from aligners.similarity.algebra.grid import of_moments
from aligners.similarity.algebra.moments import (
    GridMoments,
    Varying,
    by_tile,
    check_moments,
)
from aligners.similarity.functional.canonical_correlations import (
    Canonical,
    Whitening,
    Whitenings,
    canonical,
    whitenings,
)


class Correlations(NamedTuple):
    """What CCA, SVCCA and PWCCA in both directions are averages of: one decomposition of every layer pair.

    It leaves the directions out, which would be twice as large as the moments.

    Attributes:
        rho: of each pair of canonical variables, (L_x, L_y, c); zero beyond `rank`.
        rank: number of them, (L_x, L_y).
        weight_x: α, how much of X's neurons each variable of X accounts for, (L_x, L_y, c); weight_y: of Y's.
        directions: whether there are weights; both are 0 where nobody asked for them.
    """

    rho: Tensor
    rank: Tensor
    weight_x: Tensor
    weight_y: Tensor
    directions: bool

    def swap(self) -> Self:
        """The same with X and Y in each other's place: all pairs (L_y, L_x)."""
        return type(self)(
            rho=self.rho.transpose(0, 1),
            rank=self.rank.T,
            weight_x=self.weight_y.transpose(0, 1),
            weight_y=self.weight_x.transpose(0, 1),
            directions=self.directions,
        )

    def mean(self) -> Tensor:
        """Σρ_i / rank, (L_x, L_y): CCA, or SVCCA."""
        return self.rho.sum(-1) / self.rank

    def mean_square(self) -> Tensor:
        """Σρ_i² / rank, (L_x, L_y): R² of CCA, or of SVCCA."""
        return self.rho.square().sum(-1) / self.rank

    def weighted(self) -> Tensor:
        """Σα_iρ_i / Σα_i with the weights of X, (L_x, L_y): PWCCA from X to Y; `swap()` first for the other."""
        weighted = self.weight_x * self.rho
        return weighted.sum(-1) / self.weight_x.sum(-1)


class SharedMoments:
    """Moments that remember what measures decompose: a whitening of each layer, correlations of each pair of layers.

    Of correlations no directions are remembered, which would be twice as large as the moments. Refusals are not
    remembered, so that each measure that asks is told so by its own name.

    Args:
        moments: moments of the rows.
        white: whitenings of the layers of X and of Y, which other pairs of models may share; default: of these moments
            alone.
        origin: whose swapped form this is, which remembers for both.
    """

    def __init__(
        self, moments: GridMoments, *white: Whitenings, origin: Self | None = None
    ) -> None:
        self.moments = moments
        self._origin = origin
        if not white:
            white = whitenings(moments.xx), whitenings(moments.yy)
        self.white_x, self.white_y = white
        self._known: dict[Key, Correlations] = {}
        self._values: dict[Callable[[GridMoments], Tensor], Tensor] = {}

    def swap(self) -> Self:
        """Swap X and Y."""
        if self._origin is not None:
            return self._origin
        white = self.white_y, self.white_x
        return type(self)(self.moments.swap(), *white, origin=self)

    def value(self, formula: Callable[[GridMoments], Tensor]) -> Tensor:
        """A formula of the moments, (L_x, L_y), computed at the first call: several measures are made of it."""
        if formula not in self._values:
            self._values[formula] = formula(self.moments)
        return self._values[formula]

    def correlations(
        self,
        measure: str,
        share: float,
        held_out: Self | None = None,
        *,
        standardised: bool = False,
        weighted: bool = True,
    ) -> Correlations:
        """Canonical correlations of all layer pairs, computed at the first call.

        Args:
            measure: the measure's name, for error messages.
            share: share of the variance in (0, 1].
            held_out: rows to take the correlations on, with directions and weights of these rows; None: these rows.
            standardised: as in `svcca`.
            weighted: whether weights are wanted: without them no singular vectors are computed.

        Raises:
            ValueError: as `svcca` and `cca_held_out`.
        """
        if self._origin is not None:
            other = held_out and held_out.swap()
            swapped = self._origin.correlations(
                measure, share, other, standardised=standardised, weighted=weighted
            )
            return swapped.swap()

        directions = weighted or held_out is not None
        key = (share, standardised, held_out)
        known = self._known.get(key)
        if known is None or (directions and not known.directions):
            white = _whitened(self, measure, share, standardised)
            if held_out is None:
                known = _decomposed(white, self.moments, None, directions)
            else:
                known = _held_out(white, self.moments, held_out.moments, measure)
            self._known[key] = known
        return known


Key = tuple[float, bool, SharedMoments | None]  # share, standardised, held-out rows


@of_moments
def cca(moments: GridMoments) -> Tensor:
    """Mean canonical correlation, Σρ_i / min(rank X, rank Y) (Hotelling 1936; Kornblith et al. 2019, Table 1).

    In [0, 1], symmetric, and invariant to any invertible affine map of either side. Biased upwards where rows
    are few for the width: see `cca_held_out`. Feature side: each layer is whitened once, and each pair of
    layers needs the singular values of one d_x x d_y matrix.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: no more rows than one side's rank + 1 (every correlation is then 1 by counting), non-finite
            rows, constant features, or a decomposition that does not converge.
    """
    shared = SharedMoments(moments)
    return shared.correlations("CCA", 1.0, weighted=False).mean()


@of_moments
def r2_cca(moments: GridMoments) -> Tensor:
    """‖Q_YᵀQ_X‖² / min(rank X, rank Y), the mean *squared* canonical correlation (Ren et al. 2023, Table 2).

    Q_X and Q_Y are orthonormal bases of the centred rows. In [0, 1] and never above `cca`, of which it has the
    invariances and the bias.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: as `cca`.
    """
    shared = SharedMoments(moments)
    return shared.correlations("R² of CCA", 1.0, weighted=False).mean_square()


@of_moments
def r2_svcca(moments: GridMoments, *, share: float = 0.99) -> Tensor:
    """`r2_cca` between the principal components of X and of Y (Ren et al. 2023, Table 2).

    The paper writes ‖(U_Y T_Y)ᵀU_X T_X‖² / min(‖T_X‖², ‖T_Y‖²): T selects the leading left singular vectors U.

    Args:
        moments: moments of the rows.
        share: share of the variance in (0, 1] that each side keeps.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: as `svcca`.
    """
    shared = SharedMoments(moments)
    return shared.correlations("R² of SVCCA", share, weighted=False).mean_square()


@of_moments
def svcca(
    moments: GridMoments, *, share: float = 0.99, standardised: bool = False
) -> Tensor:
    """Mean canonical correlation between the principal components of X and of Y (Raghu et al. 2017; Wu et al. A.3).

    Each side keeps the fewest components that carry `share` of its *variance*. In [0, 1], symmetric, and invariant
    to rotations, to one factor for all features and to translation. Feature side, as `cca`.

    Args:
        moments: moments of the rows.
        share: share of the variance in (0, 1]; 1 is CCA.
        standardised: divide every feature by its deviation first, as the code released with Wu et al. does.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: `share` out of range, fewer rows than the components need, non-finite rows, a layer in which
            nothing varies (`standardised`: a feature that does not), or a decomposition that does not converge.
    """
    found = SharedMoments(moments).correlations(
        "SVCCA", share, standardised=standardised, weighted=False
    )
    return found.mean()


@of_moments
def pwcca(
    moments: GridMoments, *, share: float = 0.99, standardised: bool = False
) -> Tensor:
    """Projection-weighted mean canonical correlation, Σα_iρ_i / Σα_i (Morcos et al. 2018; Wu et al. A.3).

    α_i = Σ_j |⟨h_i, x_j⟩| weighs a canonical variable h_i of X by how much of X's neurons x_j, centred and in
    full, it accounts for. The variables come from a CCA after a PCA to `share` of the variance, as in Wu et al.;
    `share` 1 is the measure of Morcos et al. Not symmetric: the weights are X's, and `moments.swap()` gives Y's.
    In [0, 1]. Invariant to translation and to one factor for all features; to rotations of Y, but only to
    permutations and signs of X's neurons. Feature side.

    Args:
        moments: moments of the rows.
        share: share of the variance in (0, 1].
        standardised: as in `svcca`, for the directions; the weights are those of X's neurons as they are.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: as `svcca`.
    """
    shared = SharedMoments(moments)
    found = shared.correlations("PWCCA", share, standardised=standardised)
    return found.weighted()


def cca_held_out(fitted: GridMoments, held_out: GridMoments) -> Tensor:
    """Mean correlation on held-out rows of the canonical variables of the fitting rows, (L_x, L_y).

    The directions come from `fitted`, and the correlation of each pair of variables from `held_out`. It is free
    of the bias of `cca`; a correlation may be negative and is not clamped.

    Raises:
        ValueError: as `cca` for `fitted`; fewer than 3 held-out rows, or a canonical variable that is constant on them.
    """
    shared = SharedMoments(fitted)
    return shared.correlations("CCA", 1.0, SharedMoments(held_out)).mean()


def _whitened(
    shared: SharedMoments, measure: str, share: float, standardised: bool
) -> tuple[Whitening, Whitening]:
    """Whitenings of all layers of X and of Y. Raises if there are no correlations."""
    varying: Varying = "features" if share == 1 or standardised else "layers"
    moments = shared.moments
    check_moments(moments, measure, 3, x=varying, y=varying)
    x = shared.white_x(share, standardised)
    y = shared.white_y(share, standardised)
    n = int(moments.n)
    rank_x = x.most()
    rank_y = y.most()
    # two subspaces of n - 1 dimensions have at least so many in common
    certain = rank_x + rank_y - (n - 1)
    if certain > 0:
        features = moments.xx.shape[-1] + moments.yy.shape[-1]
        raise UserError(
            f"{measure} expects more rows than the two layers have directions together, but `moments` hold {n} for "
            f"{rank_x} and {rank_y}: {min(certain, rank_x, rank_y)} correlations would be 1 whatever the data. Give "
            f"at least {features + 1} rows, or use SVCCA or PWCCA with a lower `share`."
        )
    return x, y


def _decomposed(
    white: tuple[Whitening, Whitening],
    moments: GridMoments,
    held_out: GridMoments | None,
    directions: bool = True,
) -> Correlations:
    """All correlations and weights, NaN where a canonical variable is constant on the held-out rows."""
    white_x, white_y = white
    rank = white_x.rank[:, None].minimum(white_y.rank)
    c = min(white_x.most(), white_y.most())

    def of_tile(i: int, some: slice, xy: Tensor) -> Tensor:
        both = white_x.of(i), white_y.of(some)
        variables = canonical(*both, xy, directions=directions)
        rho = _rho(variables, held_out, i, some)
        weights = [torch.zeros_like(rho)] * 2
        if directions:
            weights = _weights(variables, moments.xx[i], moments.yy[some])
        values = torch.stack([rho, *weights], 1)
        return pad(values, (0, c - rho.shape[-1]))

    rho, weight_x, weight_y = by_tile(moments, of_tile).unbind(2)
    return Correlations(rho, rank, weight_x, weight_y, directions)


def _weights(found: Canonical, xx: Tensor, yy: Tensor) -> list[Tensor]:
    """α of the canonical variables of X and of Y, (J, c) each."""
    products = xx @ found.a, yy @ found.b
    return [product.abs().sum(-2) for product in products]


def _held_out(
    white: tuple[Whitening, Whitening],
    moments: GridMoments,
    held_out: GridMoments,
    measure: str,
) -> Correlations:
    """Correlations on held-out rows, weights on the rows that the directions were fitted on."""
    check_moments(held_out, f"Held-out {measure}", 3)
    result = _decomposed(white, moments, held_out)
    places = torch.arange(result.rho.shape[-1], device=result.rho.device)
    used = places < result.rank[..., None]
    constant = used & result.rho.isnan()
    if constant.any():
        raise UserError(
            f"Held-out {measure} expects canonical variables that vary on the rows of `held_out`, but "
            f"{int(constant.sum())} of {int(used.sum())} are constant on its {int(held_out.n)} rows. Give more rows."
        )
    return result._replace(rho=result.rho.where(used, 0.0))


def _rho(found: Canonical, held_out: GridMoments | None, i: int, some: slice) -> Tensor:
    """Correlations of canonical variables of layer i with some layers of Y, (J, c); NaN of what is constant."""
    if held_out is None:
        return found.rho
    a, b = found.a, found.b
    variance_a = (a * (held_out.xx[i] @ a)).sum(-2)
    variance_b = (b * (held_out.yy[some] @ b)).sum(-2)
    covariance = (a * (held_out.xy[i, some] @ b)).sum(-2)
    variance = variance_a * variance_b
    variance = variance.where(variance > 0, torch.nan)
    return covariance / variance.sqrt()
