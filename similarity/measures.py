"""One metric for each measure that lives on moments; in a `MetricCollection` they accumulate once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from similarity.functional.cca import cca_from_moments, pwcca_from_moments, svcca_from_moments
from similarity.functional.checks import check_share
from similarity.functional.cka import linear_cka_from_moments, unbiased_cka_from_moments
from similarity.functional.neurons import neuronsim_from_moments
from similarity.functional.regression import mixedsim_from_moments, r2_from_moments
from similarity.functional.summaries import nuclear_norm_from_moments
from similarity.moments import GridMomentsMetric

__all__ = ["CCA", "PWCCA", "R2", "SVCCA", "LinearCKA", "MixedSim", "NeuronSim", "NuclearNorm", "UnbiasedCKA"]


class LinearCKA(GridMomentsMetric):
    """`linear_cka` of all rows seen, (L_x, L_y)."""

    def compute(self) -> Tensor:
        """(L_x, L_y)."""
        return linear_cka_from_moments(self.moments())


class UnbiasedCKA(GridMomentsMetric):
    """`unbiased_cka` of all rows seen, (L_x, L_y)."""

    def compute(self) -> Tensor:
        """(L_x, L_y)."""
        return unbiased_cka_from_moments(self.moments())


class CCA(GridMomentsMetric):
    """`cca` of all rows seen, (L_x, L_y)."""

    def compute(self) -> Tensor:
        """(L_x, L_y)."""
        return cca_from_moments(self.moments())


class SVCCA(GridMomentsMetric):
    """`svcca` of all rows seen, (L_x, L_y).

    Args:
        layers_x: L_x.
        d_x: width of X's states.
        layers_y: L_y.
        d_y: width of Y's states.
        share: share of the variance that the components keep, in (0, 1].
    """

    def __init__(self, layers_x: int, d_x: int, layers_y: int, d_y: int, *, share: float = 0.99, **kwargs: Any) -> None:
        check_share(share)
        super().__init__(layers_x, d_x, layers_y, d_y, **kwargs)
        self.share = share

    def compute(self) -> Tensor:
        """(L_x, L_y)."""
        return svcca_from_moments(self.moments(), share=self.share)


class PWCCA(SVCCA):
    """`pwcca` of all rows seen, weighted by X, (L_x, L_y); arguments as those of `SVCCA`."""

    def compute(self) -> Tensor:
        """(L_x, L_y)."""
        return pwcca_from_moments(self.moments(), share=self.share)


class R2(GridMomentsMetric):
    """`r2` of all rows seen: how much of X a regression on Y explains, (L_x, L_y)."""

    def compute(self) -> Tensor:
        """(L_x, L_y)."""
        return r2_from_moments(self.moments())


class NeuronSim(GridMomentsMetric):
    """`neuronsim` of all rows seen, (L_x, L_y)."""

    def compute(self) -> Tensor:
        """(L_x, L_y)."""
        return neuronsim_from_moments(self.moments())


class MixedSim(GridMomentsMetric):
    """`mixedsim` of all rows seen: neurons of X regressed on Y, (L_x, L_y)."""

    def compute(self) -> Tensor:
        """(L_x, L_y)."""
        return mixedsim_from_moments(self.moments())


class NuclearNorm(GridMomentsMetric):
    """Nuclear norm of the centred rows of each layer seen, (L_x,) and (L_y,)."""

    def compute(self) -> tuple[Tensor, Tensor]:
        """(L_x,) of X and (L_y,) of Y."""
        return nuclear_norm_from_moments(self.moments())
