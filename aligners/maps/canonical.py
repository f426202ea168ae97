"""Maps along canonical directions: CCA, SVCCA, PWCCA.

With canonical directions aᵢ, bᵢ of centred rows (aᵢᵀXᵀXaᵢ = bᵢᵀYᵀYbᵢ = 1, aᵢᵀXᵀYbᵢ = ρᵢ), all three are

    g(x) = ȳ + Σᵢ sᵢ · aᵢᵀ(x − x̄) · YᵀYbᵢ   over the directions that are kept.

YᵀYbᵢ is the regression of Y on its own canonical variate Ybᵢ, so that Σᵢ bᵢᵀ(y − ȳ) · YᵀYbᵢ is the y nearest to y
with these variates alone: the rows of that matrix are the pseudo-inverse of W_Y = (b₁ …) in the metric of Y's
covariance, and W_Y⁻¹ itself where Y has full rank and all directions are kept. With sᵢ = 1 the map is W_X W_Y⁻¹ of
Ren et al. (eq. 6): the variates of X take the place of those of Y. A direction then adds 1 − 2ρᵢ times its share of
Y's variance to the error, so directions with ρᵢ < ½ do harm. With `shrink`, sᵢ = ρᵢ: the least-squares map from these
variates of X, in which no direction does harm on the fitting rows.

Whitening needs no ridge: directions in which the states do not vary (behind a LayerNorm there is always one) are
dropped, by the option `tolerance`. Signs, and the choice of basis among equal correlations, cancel in the product.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from aligners.errors import UserError, check_range
from aligners.maps.linear import Affine
from aligners.maps.shared_solutions import CanonicalSolution, canonical_solution
from aligners.maps.solvers import deviations
from aligners.similarity.algebra.moments import Moments
from aligners.similarity.functional.canonical_correlations import Canonical


class _Canonical(Affine):
    """The options and findings shared by all maps along canonical directions.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        shrink: scale each direction by its correlation.
        tolerance: eigenvalues of a correlation matrix of states below this share of the largest count as zero.
        share: share of the variance or of the projection weight, in (0, 1].
        directions: how many to keep; None: all.

    Raises:
        ValueError: `share` or `directions` is out of range.
    """

    correlations: Tensor

    def __init__(
        self,
        sites: int,
        d_x: int,
        d_y: int,
        *,
        share: float = 0.99,
        directions: int | None = None,
        shrink: bool = False,
        tolerance: float = 1e-10,
    ) -> None:
        super().__init__(sites, d_x, d_y)
        narrower = min(d_x, d_y)
        check_range(above=0, most=1, share=share)
        check_range(least=1, most=narrower, directions=directions)
        self.share = share
        self.directions = directions
        self.shrink = shrink
        self.tolerance = tolerance
        self.invertible = not shrink
        unknown = torch.full((sites, narrower), torch.nan)
        self.register_buffer("correlations", unknown)

    def _keep(self, moments: Moments, found: Canonical, kept: Tensor) -> None:
        """Set the map to that of the directions in `kept` (S, c)."""
        number = kept.shape[-1]
        self.correlations.fill_(torch.nan)
        self.correlations[:, :number] = torch.where(kept, found.rho, torch.nan)

        out_of = found.b.mT @ moments.yy
        if self.shrink:
            scales = kept * found.rho
            into = found.a * scales[:, None]
            self.set_map(moments, into @ out_of)
            return
        chosen = kept.double()[:, None]
        into = found.a * chosen
        back_into = found.b * chosen
        back_out_of = found.a.mT @ moments.xx
        self.set_map(moments, into @ out_of, back_into @ back_out_of)

    def findings(self) -> dict[str, Any]:
        """How many directions each site keeps, and their mean correlation on the fitting rows."""
        rho = self.correlations
        directions = rho.isfinite().sum(-1)
        mean = rho.nanmean(-1)
        return {"directions": directions.tolist(), "mean_correlation": mean.tolist()}


class CCA(_Canonical):
    """Puts the canonical variates of X in the place of those of Y (Hotelling 1936; Ren et al. §3.3, eq. 3 to 6).

    With all directions and `shrink` it is least squares, whatever the rank of X. Without `shrink` it keeps the
    spread of Y and is its own way back: `inverse` is the map that the same fit gives from Y to X, exact where both
    have full rank and equal widths and all directions are kept. States after a LayerNorm never have full rank. A shrunk
    map is a regression, and the way back is a different regression: it has no inverse. Both commute with invertible
    linear maps of X and of Y. Whitening gives a direction of tiny variance the same weight as any other (Ren et al.,
    Table 2: not robust).

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        directions: c, how many canonical directions to keep, those of the largest correlations; None: all.
        shrink: scale each direction by its correlation.
        tolerance: eigenvalues of a correlation matrix of states below this share of the largest count as zero.

    Attributes:
        correlations: (S, min(d_x, d_y)) canonical correlations, descending; NaN where a direction is not kept.
    """

    def __init__(
        self,
        sites: int,
        d_x: int,
        d_y: int,
        *,
        directions: int | None = None,
        shrink: bool = False,
        tolerance: float = 1e-10,
    ) -> None:
        super().__init__(
            sites,
            d_x,
            d_y,
            share=1.0,
            directions=directions,
            shrink=shrink,
            tolerance=tolerance,
        )
        # one more than X and Y have directions together, at full rank
        self.rows_needed = d_x + d_y + 1

    def fit(self, moments: Moments) -> None:
        """Solve from moments, in float64.

        Raises:
            ValueError: a neuron is constant, or there are too few rows, or fewer directions than asked for.
        """
        solution, *_ = _solve(moments, 1.0, self.tolerance)
        chosen = _first(solution, self.directions)
        self._keep(moments, solution, chosen)


class SVCCA(_Canonical):
    """CCA between the principal components of X and of Y, mapped back to the full space.

    Each model by itself keeps the principal components that hold a given share of its variance (Raghu et al. 2017;
    Ren et al. §3.3). The error is over the full space, so it compares with that of the other maps: what lies outside
    the components kept of Y is unexplained. Ren et al. (§4.1) report the error within them, which is among the
    findings. The map commutes with orthogonal maps and with one scale of X and of Y; with a share below 1, not with
    other linear maps.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        share: share of the variance to keep, in (0, 1]; of the eigenvalues, not of the singular values. 1 is CCA.
        directions: how many canonical directions to keep, those of the largest correlations; None: all.
        shrink: scale each direction by its correlation; there is then no inverse.
        tolerance: eigenvalues below this share of the largest count as zero.

    Attributes:
        correlations: (S, min(d_x, d_y)) canonical correlations, descending; NaN where a direction is not kept.
        components: (S, 2) number of principal components kept of X and of Y.
        reduced_mse: (S,) squared error of the fitting rows within Y's components, mean over rows and components.
        reduced_fvu: (S,) the same, as a share of the variance within them.
    """

    figures: ClassVar = {"components": (2,), "reduced_mse": (), "reduced_fvu": ()}
    components: Tensor
    reduced_mse: Tensor
    reduced_fvu: Tensor

    def fit(self, moments: Moments) -> None:
        """Solve from moments, in float64.

        Raises:
            ValueError: a site is constant, or there are too few rows, or fewer directions than asked for.
        """
        solution, white_x, white_y = _solve(moments, self.share, self.tolerance)
        chosen = _first(solution, self.directions)
        self._keep(moments, solution, chosen)
        ranks = torch.stack([white_x.rank, white_y.rank], -1)
        self.components.copy_(ranks)

        # of Y's squares, along its whitened directions
        whitened = moments.yy @ white_y.in_use()
        within_y = whitened.square().sum((1, 2))
        error = within_y + self._changes(moments, solution, chosen)
        entries = moments.n * white_y.rank
        self.reduced_mse.copy_(error / entries)
        self.reduced_fvu.copy_(error / within_y)

    def _changes(self, moments: Moments, found: Canonical, kept: Tensor) -> Tensor:
        """What the map changes in Y's squares, (S,): canonical variates are uncorrelated, so directions add up."""
        rho = found.rho
        scales = torch.ones_like(rho)
        if self.shrink:
            scales = rho
        changes = kept * (scales**2 - 2 * scales * rho)
        regression = found.b.mT @ moments.yy
        explained = regression.square().sum(-1)
        return (changes * explained).sum(-1)

    def findings(self) -> dict[str, Any]:
        """Directions, components, correlation, and the error in the reduced space, all on the fitting rows."""
        components_x, components_y = self.components.int().unbind(-1)
        return {
            **super().findings(),
            "components_x": components_x.tolist(),
            "components_y": components_y.tolist(),
            "reduced_mse": self.reduced_mse.tolist(),
            "reduced_fvu": self.reduced_fvu.tolist(),
        }


def reduced_mse(aligner: nn.Module | None, sites: int) -> list[float | None]:
    """The squared error that Ren et al. (§4.1) report of SVCCA, on the fitting rows, by site; None of other maps."""
    if not isinstance(aligner, SVCCA):
        return [None] * sites
    errors: list[float | None] = []
    for error in aligner.reduced_mse.tolist():
        known = math.isfinite(error)
        errors.append(error if known else None)
    return errors


class PWCCA(_Canonical):
    """CCA along the fewest directions that carry a given share of the projection weight.

    The weight of direction i is αᵢ = Σⱼ |⟨Xaᵢ, xⱼ⟩| over the centred columns xⱼ of X (Morcos et al. 2018; Ren et al.
    eq. 8 and 9). Both papers use α in a weighted mean of correlations and define no map by it; Ren et al. tabulate
    PWCCA with CCA's error. Keeping the directions that carry α is this project's reading of it as a map.

    The weights depend on the basis of X. The map back has its own: a fit from Y to X may keep other directions.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        share: share of Σαᵢ to keep, in (0, 1]. 1 is CCA.
        shrink: scale each direction by its correlation; there is then no inverse.
        tolerance: eigenvalues of a correlation matrix of states below this share of the largest count as zero.

    Attributes:
        correlations: (S, min(d_x, d_y)) canonical correlations, descending; NaN where a direction is not kept.
        carried: (S,) share of Σαᵢ that the kept directions carry.
    """

    figures: ClassVar = {"carried": ()}
    carried: Tensor

    def __init__(
        self,
        sites: int,
        d_x: int,
        d_y: int,
        *,
        share: float = 0.99,
        shrink: bool = False,
        tolerance: float = 1e-10,
    ) -> None:
        super().__init__(
            sites, d_x, d_y, share=share, shrink=shrink, tolerance=tolerance
        )
        self.rows_needed = d_x + d_y + 1  # as of CCA

    def fit(self, moments: Moments) -> None:
        """Solve from moments, in float64.

        Raises:
            ValueError: a neuron is constant, or there are too few rows.
        """
        solution, *_ = _solve(moments, 1.0, self.tolerance)
        products = solution.a.mT @ moments.xx
        alpha = products.abs().sum(-1)
        exists = _first(solution, None)
        chosen = exists & _heaviest(alpha, self.share)
        total = alpha.sum(-1)
        carried = (alpha * chosen).sum(-1)
        self.carried.copy_(carried / total)
        self._keep(moments, solution, chosen)

    def findings(self) -> dict[str, Any]:
        """How many directions each site keeps, their mean correlation, and the share of Σα that they carry."""
        found = super().findings()
        found["alpha_share"] = self.carried.tolist()
        return found


def _solve(moments: Moments, share: float, tolerance: float) -> CanonicalSolution:
    """Find canonical directions from moments, and raise if they would mean nothing."""
    deviations(moments, constant_neurons=share < 1)
    return canonical_solution(moments, share, tolerance)


def _first(found: Canonical, directions: int | None) -> Tensor:
    """Select the first `directions` of each site, or all that are no padding: (S, c) bool."""
    numbers = torch.arange(found.rho.shape[-1], device=found.rho.device)
    exists = numbers < found.rank[:, None]
    if directions is None:
        return exists
    if (found.rank < directions).any():
        site = int(found.rank.argmin())
        raise UserError(
            f"Expected states with at least `directions` = {directions} canonical directions, but site pair number "
            f"{site} has {int(found.rank[site])}. Ask for fewer, or for all with None."
        )
    return exists & (numbers < directions)


def _heaviest(alpha: Tensor, share: float) -> Tensor:
    """Select the fewest directions whose weights add up to `share` of Σα, the heaviest first: (S, c) bool."""
    weight, order = alpha.sort(dim=-1, descending=True)
    # the weight of a direction and all lighter ones
    lightest_first = weight.flip(-1).cumsum(-1)
    rest = lightest_first.flip(-1)
    total = weight.sum(-1, keepdim=True)
    heavy = rest > (1 - share) * total
    chosen = torch.zeros_like(heavy)
    return chosen.scatter(-1, order, heavy)
