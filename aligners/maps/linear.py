"""Maps with a closed form: identity, mean, least squares, ridge regression, orthogonal Procrustes, permutation."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from aligners.errors import check_range
from aligners.maps.base import Aligner
from aligners.maps.solvers import (
    STRENGTHS,
    deviations,
    least_squares,
    procrustes_rotation,
    ridge_regression,
)
from aligners.similarity.algebra.decompositions import thin_svd
from aligners.similarity.algebra.moments import Moments, squares


class Affine(Aligner):
    """y = (x − x̄) W + ȳ, and back through a pseudo-inverse: the form of every linear closed form.

    A subclass's `fit` passes the matrices of its own definition to `set_map`.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.

    Attributes:
        figures: results of a fit besides the map: name of a buffer -> its shape at each site. Buffers are NaN before
            the fit.
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
            unknown = torch.full((sites, *shape), torch.nan)
            self.register_buffer(name, unknown)

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d_x) -> (S, N, d_y)."""
        centred = x - self.mean_x
        return torch.baddbmm(self.mean_y, centred, self.weight)

    def inverse(self, y: Tensor) -> Tensor:
        """(S, N, d_y) -> (S, N, d_x)."""
        if not self.invertible:
            return super().inverse(y)
        centred = y - self.mean_y
        return torch.baddbmm(self.mean_x, centred, self.weight_back)

    def set_map(
        self, moments: Moments, weight: Tensor, weight_back: Tensor | None = None
    ) -> None:
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
        ridge: the penalty of each feature, relative to its own variance: see `least_squares`.
        inverse_tolerance: singular values of W below this share of the largest are dropped by the inverse.

    Attributes:
        condition: (S,) largest over smallest singular value of W.
    """

    figures: ClassVar = {"condition": ()}
    condition: Tensor

    def __init__(
        self,
        sites: int,
        d_x: int,
        d_y: int,
        *,
        ridge: float = 1e-6,
        inverse_tolerance: float = 1e-6,
    ) -> None:
        super().__init__(sites, d_x, d_y)
        check_range(least=0, ridge=ridge)
        self.ridge = ridge
        self.inverse_tolerance = inverse_tolerance
        self.invertible = d_x == d_y
        self.rows_needed = d_x + 1  # one more than there are unknowns for each output

    def fit(self, moments: Moments) -> None:
        """Solve from moments, in float64."""
        weight = least_squares(moments, self.ridge)
        u, singular, vh = thin_svd(weight)
        largest = singular[:, :1]
        condition = largest / singular[:, -1:]
        self.condition.copy_(condition.squeeze(-1))
        kept = singular > self.inverse_tolerance * largest
        inverted = torch.where(kept, 1 / singular, 0.0)
        inverted = inverted[:, None]
        back = vh.mT * inverted @ u.mT
        self.set_map(moments, weight, back)

    def findings(self) -> dict[str, Any]:
        """The condition number of W at each site: how far its inverse can be trusted."""
        return {"condition_number": self.condition.tolist()}


class Ridge(Affine):
    """Ridge regression with an intercept: least squares with shrinkage, whose strength other rows choose.

    The baseline where rows are few: least squares itself is worthless at as many rows as dimensions. The strength
    of each site is chosen by the error on validation rows, or, without any, by generalised cross-validation: see
    `ridge_regression`. It is a regression, and the way back is a different regression: the map has no inverse.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.

    Attributes:
        ridge: (S,) the strength that was chosen out of `STRENGTHS`: the penalty of each feature, relative to its own
            variance or the mean of all.
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
        rows = 0
        if validation is not None:
            rows = int(validation.n)
        self.ridge.copy_(ridge)
        self.validation_rows.fill_(rows)
        self.set_map(moments, weight)

    def findings(self) -> dict[str, Any]:
        """Return the strength at each site, what chose it, and where it is the largest or smallest candidate."""
        chosen_by = "generalised cross-validation on the fitting rows"
        rows = int(self.validation_rows.max())
        if rows:
            chosen_by = f"{rows} validation rows"
        strengths = []
        for value in self.ridge.tolist():
            rounded = float(f"{value:.3g}")
            strengths.append(rounded)
        found: dict[str, Any] = {"ridge": strengths, "ridge_chosen_by": chosen_by}
        edges = {STRENGTHS[0]: "smallest", STRENGTHS[-1]: "largest"}
        at_the_edge = [edges.get(strength) for strength in strengths]
        if any(at_the_edge):
            found["ridge_at_the_edge"] = at_the_edge
        return found


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
        back = rotation.mT
        if self.scale:
            total = squares(moments.xx).sum(-1)
            factor = singular.sum(-1) / total
            factor = factor[:, None, None]
            rotation = rotation * factor
            back = back / factor
        self.set_map(moments, rotation, back)


class Permutation(Affine):
    """y_j = ȳ_j + (x_π(j) − x̄_π(j)): every neuron of Y gets the neuron of X that is matched to it.

    π maximises the sum of the Pearson correlations over all one-to-one matchings (the assignment problem, solved
    exactly). Renaming the neurons of a hidden layer changes no network's output, so two models can differ by that
    alone (Hecht-Nielsen 1990; Ren et al. §1). Nothing is scaled: neurons are renamed, and centred on
    Y's means. The matching does not depend on the scale or the offset of any neuron.

    Bijective at equal widths. At unequal widths the wider side's neurons without a partner are left out: those of
    Y get their mean, those of X get theirs on the way back.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        signed: match by absolute correlation, and flip the sign of partners that are correlated negatively.

    Attributes:
        correlation: (S,) mean over the matched pairs of the correlation (of its absolute value where `signed`).
    """

    figures: ClassVar = {"correlation": ()}
    invertible = True
    rows_needed = 3  # over two rows every correlation is 1 or −1
    correlation: Tensor

    def __init__(self, sites: int, d_x: int, d_y: int, *, signed: bool = False) -> None:
        super().__init__(sites, d_x, d_y)
        self.bijective = d_x == d_y
        self.signed = signed

    def fit(self, moments: Moments) -> None:
        """Match neurons by their correlations, in float64; the assignments of all sites go to the CPU and back at once.

        Raises:
            ValueError: a neuron is constant over the fitting rows, or not finite.
        """
        from scipy.optimize import linear_sum_assignment

        x, y = deviations(moments)
        x = x[:, :, None]
        y = y[:, None, :]
        correlations = moments.xy / moments.n / (x * y)  # Pearson's
        signs = torch.ones_like(correlations)
        if self.signed:
            signs = signs.copysign(correlations)
        matched_by = signs * correlations

        partners = []
        for values in matched_by.cpu().numpy():
            pairs = linear_sum_assignment(values, maximize=True)
            partners.append(torch.from_numpy(np.stack(pairs)))
        of_x, of_y = torch.stack(partners, 1).to(x.device)
        sites = torch.arange(len(partners), device=x.device)[:, None]
        weight = torch.zeros_like(correlations)
        weight[sites, of_x, of_y] = signs[sites, of_x, of_y]

        number = min(self.d_x, self.d_y)
        matched = weight * correlations
        total = matched.sum((1, 2))
        self.correlation.copy_(total / number)
        self.set_map(moments, weight, weight.mT)

    def findings(self) -> dict[str, Any]:
        """How well partners correlate at each site, on the fitting rows."""
        return {"mean_correlation": self.correlation.tolist()}


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
        """Fit nothing."""
