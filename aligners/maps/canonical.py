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

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aligners.maps.base import MORE_ROWS
from aligners.maps.linear import Affine, deviations
from aligners.similarity.algebra.moments import Moments
from aligners.similarity.functional.canonical import canonical, whitening

__all__ = ["CCA", "PWCCA", "SVCCA", "reduced_mse"]


class _Canonical(Affine):
    """The options and findings shared by all maps along canonical directions.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        options: the subclass's options, as `options` returns them.

    Raises:
        ValueError: `share` or `directions` is out of range.
    """

    correlations: Tensor

    def __init__(self, sites: int, d_x: int, d_y: int, **options: Any) -> None:
        super().__init__(sites, d_x, d_y)
        self._options = options
        share, directions = options.get("share", 1.0), options.get("directions")
        if not 0 < share <= 1:
            raise ValueError(f"Expected `share` in (0, 1], but got {share:g}.")
        if directions is not None and not 1 <= directions <= min(d_x, d_y):
            raise ValueError(
                f"Expected `directions` to be at least 1 and at most {min(d_x, d_y)}, the smaller width, but got "
                f"{directions}. None keeps all."
            )
        self.share, self.directions = share, directions
        self.shrink, self.tolerance = options["shrink"], options["tolerance"]
        self.invertible = not self.shrink
        self.register_buffer("correlations", torch.full((sites, min(d_x, d_y)), float("nan")))

    @property
    def rows_needed(self) -> int:
        """One more than X and Y have directions together, at full rank."""
        return self.d_x + self.d_y + 1

    def _keep(self, moments: Moments, found: _Solved, kept: Tensor) -> None:
        """Set the map to that of the directions in `kept` (S, c)."""
        self.correlations.fill_(float("nan"))
        self.correlations[:, : kept.shape[-1]] = torch.where(kept, found.rho, float("nan"))
        factor = (kept * found.rho if self.shrink else kept.double())[:, None]
        back = None if self.shrink else (found.b * factor) @ found.onto_x
        self.set_map(moments, (found.a * factor) @ found.onto_y, back)

    def findings(self) -> dict[str, Any]:
        """How many directions each site keeps, and their mean correlation on the fitting rows."""
        return {
            "directions": self.correlations.isfinite().sum(-1).tolist(),
            "mean_correlation": self.correlations.nanmean(-1).tolist(),
        }

    def options(self) -> dict[str, Any]:
        """The subclass's own options."""
        return dict(self._options)


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
        super().__init__(sites, d_x, d_y, directions=directions, shrink=shrink, tolerance=tolerance)

    def fit(self, moments: Moments) -> None:
        """Solve from moments, in float64.

        Raises:
            ValueError: a neuron is constant, or there are too few rows, or fewer directions than asked for.
        """
        found = _solve(moments, 1.0, self.tolerance)
        self._keep(moments, found, _first(found, self.directions))


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

    components: Tensor
    reduced_mse: Tensor
    reduced_fvu: Tensor

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
        super().__init__(sites, d_x, d_y, share=share, directions=directions, shrink=shrink, tolerance=tolerance)
        self.register_buffer("components", torch.zeros(sites, 2))
        self.register_buffer("reduced_mse", torch.full((sites,), float("nan")))
        self.register_buffer("reduced_fvu", torch.full((sites,), float("nan")))

    @property
    def rows_needed(self) -> int:
        """Two: how many are needed depends on the components, and `fit` raises if there are too few."""
        return 2

    def fit(self, moments: Moments) -> None:
        """Solve from moments, in float64.

        Raises:
            ValueError: a site is constant, or there are too few rows, or fewer directions than asked for.
        """
        found = _solve(moments, self.share, self.tolerance)
        kept = _first(found, self.directions)
        self.components.copy_(torch.stack([found.rank_x, found.rank_y], -1))
        # Canonical variates are uncorrelated, so the error is a sum over directions.
        factor = found.rho if self.shrink else torch.ones_like(found.rho)
        lost = kept * (factor**2 - 2 * factor * found.rho) * found.onto_y.square().sum(-1)
        error = found.within_y + lost.sum(-1)
        self.reduced_mse.copy_(error / (moments.n * found.rank_y))
        self.reduced_fvu.copy_(error / found.within_y)
        self._keep(moments, found, kept)

    def findings(self) -> dict[str, Any]:
        """Directions, components, correlation, and the error in the reduced space, all on the fitting rows."""
        return {
            **super().findings(),
            "components_x": self.components[:, 0].int().tolist(),
            "components_y": self.components[:, 1].int().tolist(),
            "reduced_mse": self.reduced_mse.tolist(),
            "reduced_fvu": self.reduced_fvu.tolist(),
        }


def reduced_mse(aligner: nn.Module | None, sites: int) -> list[float | None]:
    """The squared error that Ren et al. (§4.1) report of SVCCA, on the fitting rows, by site; None of other maps."""
    if not isinstance(aligner, SVCCA):
        return [None] * sites
    return [float(value) if value.isfinite() else None for value in aligner.reduced_mse]


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

    carried: Tensor

    def __init__(
        self, sites: int, d_x: int, d_y: int, *, share: float = 0.99, shrink: bool = False, tolerance: float = 1e-10
    ) -> None:
        super().__init__(sites, d_x, d_y, share=share, shrink=shrink, tolerance=tolerance)
        self.register_buffer("carried", torch.full((sites,), float("nan")))

    def fit(self, moments: Moments) -> None:
        """Solve from moments, in float64.

        Raises:
            ValueError: a neuron is constant, or there are too few rows.
        """
        found = _solve(moments, 1.0, self.tolerance)
        alpha = found.onto_x.abs().sum(-1)
        kept = found.exists & _heaviest(alpha, self.share)
        self.carried.copy_((alpha * kept).sum(-1) / alpha.sum(-1))
        self._keep(moments, found, kept)

    def findings(self) -> dict[str, Any]:
        """How many directions each site keeps, their mean correlation, and the share of Σα that they carry."""
        return {**super().findings(), "alpha_share": self.carried.tolist()}


class _Solved(NamedTuple):
    """Canonical directions of a bank, the last axis padded with zeros to the largest rank c of any site.

    Attributes:
        rho: (S, c) correlations, descending.
        exists: (S, c) which are directions and not padding.
        a: (S, d_x, c), b: (S, d_y, c).
        onto_x: AᵀXᵀX, (S, c, d_x); onto_y: BᵀYᵀY, (S, c, d_y).
        rank_x: (S,) whitened directions of X; rank_y: of Y.
        within_y: (S,) sum of squares of Y along its whitened directions.
    """

    rho: Tensor
    exists: Tensor
    a: Tensor
    b: Tensor
    onto_x: Tensor
    onto_y: Tensor
    rank_x: Tensor
    rank_y: Tensor
    within_y: Tensor


def _solve(moments: Moments, share: float, tolerance: float) -> _Solved:
    """Find canonical directions from moments, and raise if there are too few rows for them to mean anything."""
    deviations(moments, constant_neurons=share < 1)
    white_x = whitening(moments.xx, share=share, tolerance=tolerance)
    white_y = whitening(moments.yy, share=share, tolerance=tolerance)
    together = white_x.rank + white_y.rank
    surplus = together - (moments.n - 1)
    if (surplus > 0).any():
        site = int(surplus.argmax())
        raise ValueError(
            f"Expected at least {int(together[site]) + 1} fitting rows, one more than X and Y have directions at site "
            f"pair number {site}, but got {int(moments.n)}: {int(surplus[site])} canonical correlations would be 1 "
            f"whatever the states are. {MORE_ROWS} SVCCA with a smaller `share` needs fewer."
        )
    found = canonical(white_x, white_y, moments.xy)
    exists = torch.arange(found.rho.shape[-1], device=found.rho.device) < found.rank[:, None]
    within_y = (moments.yy @ white_y.weight).square().sum((1, 2))
    onto_x, onto_y = found.a.mT @ moments.xx, found.b.mT @ moments.yy
    return _Solved(found.rho, exists, found.a, found.b, onto_x, onto_y, white_x.rank, white_y.rank, within_y)


def _first(found: _Solved, directions: int | None) -> Tensor:
    """Select the first `directions` of each site, or all: (S, c) bool."""
    if directions is None:
        return found.exists
    there = found.exists.sum(-1)
    if (there < directions).any():
        site = int(there.argmin())
        raise ValueError(
            f"Expected states with at least `directions` = {directions} canonical directions, but site pair number "
            f"{site} has {int(there[site])}. Ask for fewer, or for all with None."
        )
    return found.exists & (torch.arange(found.rho.shape[-1], device=found.rho.device) < directions)


def _heaviest(alpha: Tensor, share: float) -> Tensor:
    """Select the fewest directions whose weights add up to `share` of Σα, the heaviest first: (S, c) bool."""
    weight, order = alpha.sort(dim=-1, descending=True)
    rest = weight.flip(-1).cumsum(-1).flip(-1)  # the weight of this direction and all lighter ones
    kept = rest > (1 - share) * weight.sum(-1, keepdim=True)
    return torch.zeros_like(kept).scatter(-1, order, kept)
