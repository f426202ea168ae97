"""The best matching of neurons, one to one."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from aligners.maps.linear import Affine
from aligners.maps.solvers import deviations
from aligners.similarity.algebra.moments import Moments


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
        """Match neurons by their correlations, in float64; the assignment itself runs on the CPU.

        Raises:
            ValueError: a neuron is constant over the fitting rows, or not finite.
        """
        from scipy.optimize import linear_sum_assignment

        x, y = deviations(moments)
        correlations = (
            moments.xy / moments.n / (x[:, :, None] * y[:, None, :])
        )  # Pearson's, (S, d_x, d_y)
        ones = torch.ones_like(correlations)
        signs = ones.copysign(correlations) if self.signed else ones
        weight = torch.zeros_like(correlations)
        for site, value in enumerate((signs * correlations).cpu().numpy()):
            i, j = (
                torch.from_numpy(index)
                for index in linear_sum_assignment(value, maximize=True)
            )
            weight[site, i, j] = signs[site, i, j]
        self.correlation.copy_(
            (weight * correlations).sum((1, 2)) / min(self.d_x, self.d_y)
        )
        self.set_map(moments, weight, weight.mT)

    def findings(self) -> dict[str, Any]:
        """How well partners correlate at each site, on the fitting rows."""
        return {"mean_correlation": self.correlation.tolist()}
