"""Least squares of a rank that is given, or chosen by the share of the fit that it keeps."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from aligners.errors import check_range
from aligners.maps.linear import Affine
from aligners.maps.solvers import least_squares
from aligners.similarity.algebra.moments import Moments, squares


class ReducedRank(Affine):
    """Reduced-rank regression with an intercept: argmin ‖XW − Y‖² + penalty over all W of rank r (Izenman 1975).

    It is least squares, projected on the r leading right singular directions of its fitted values. With a ridge, these
    are the fitted values with the penalty's rows under them (Mukherjee and Zhu 2011), so that W is the minimum of
    the penalised error as well. `LowRank` is the same form as a map that is trained.

    The way back is a different regression: the map has no inverse.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        rank: r, the same at all sites, at most the smaller width. Default: the least that keeps `share`, site by site.
        share: of the variance of the (penalised) fitted values that the kept directions hold; not used with `rank`.
        ridge: the penalty of each feature, relative to its own variance: see `least_squares`.

    Attributes:
        rank_of_site: (S,) r at each site.
        kept_share: (S,) the share of that variance that is kept.

    Raises:
        ValueError: an option is out of range.
    """

    figures: ClassVar = {"rank_of_site": (), "kept_share": ()}
    rank_of_site: Tensor
    kept_share: Tensor

    def __init__(
        self,
        sites: int,
        d_x: int,
        d_y: int,
        *,
        rank: int | None = None,
        share: float = 0.99,
        ridge: float = 1e-6,
    ) -> None:
        super().__init__(sites, d_x, d_y)
        check_range(least=1, most=min(d_x, d_y), rank=rank)
        check_range(above=0, most=1, share=share)
        check_range(least=0, ridge=ridge)
        self.rank = rank
        self.share = share
        self.ridge = ridge
        self.rows_needed = d_x + 1

    def fit(self, moments: Moments) -> None:
        """Solve from moments, in float64.

        Raises:
            ValueError: the system of least squares cannot be solved.
        """
        weight = least_squares(moments, self.ridge)
        penalty = self.ridge * squares(moments.xx)
        penalised = moments.xx + penalty.diag_embed()
        fitted = weight.mT @ penalised @ weight
        values, directions = torch.linalg.eigh(fitted)
        # the largest first
        values = values.clamp(min=0).flip(-1)
        directions = directions.flip(-1)

        total = values.sum(-1, keepdim=True)
        shares = values.cumsum(-1) / total
        ranks = self._ranks(shares)
        numbers = torch.arange(self.d_y, device=values.device)
        within = numbers < ranks
        kept = directions * within[:, None]
        last = shares.gather(-1, ranks - 1)
        self.rank_of_site.copy_(ranks[:, 0])
        self.kept_share.copy_(last[:, 0])
        reduced = weight @ kept
        self.set_map(moments, reduced @ kept.mT)

    def _ranks(self, shares: Tensor) -> Tensor:
        """Return the rank of each site, (S, 1), given the share that each rank keeps, (S, d_y)."""
        most = min(self.d_x, self.d_y)
        if self.rank is not None:
            return torch.full_like(shares[:, :1], self.rank, dtype=torch.long)
        # a share of 1 may be missed by rounding
        below = (shares < self.share - 1e-12).sum(-1, keepdim=True)
        return (below + 1).clamp(max=most)

    def findings(self) -> dict[str, Any]:
        """Return the rank of each site, and the share of the fit that it keeps."""
        ranks = self.rank_of_site.nan_to_num().long()
        return {"rank": ranks.tolist(), "kept_share": self.kept_share.tolist()}
