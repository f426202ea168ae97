"""Relative representations: a row is described by its cosines with anchors, of which both models have their own."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import normalize

from aligners.errors import check_known, check_range
from aligners.maps.by_rows.kept_rows import ByRows, PairedRows
from aligners.maps.by_rows.kernel_ridge import regression
from aligners.maps.solvers import NULL
from aligners.similarity.algebra.decompositions import thin_svd
from aligners.similarity.algebra.moments import Moments, squares

Decode = Literal["inverse", "least_squares"]


class Relative(ByRows):
    """From X to cosines with its anchors, and from these to Y.

    The relative representation of a row is r = x̂ Âᵀ, x̂ its direction from the mean of the fitting rows and Â the
    directions of m anchors, rows that X and Y both have (Moschella et al. 2023, 2209.15430, §3). That paper trains
    a reader of r. How r becomes a row of Y:

    * "least_squares": ridge regression of Y on r, with the strength of least error on other rows. This is ours. It uses
      nothing of Y's anchors, and r does not know the length of x.
    * "inverse": its direction is r (Â_Yᵀ)⁺, the pseudo-inverse of Y's relative projection (Maiorca et al. 2024,
      2406.15057). That paper leaves lengths open, as readers often ignore them; ours is ‖x − x̄‖ times the ratio of the
      two models' root mean squares.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        anchors: m, the first of the draw; of fewer rows, all.
        decode: the way from r to Y.
        tolerance: of "inverse": singular values of Â_Y below this share of the largest are left out. Along them X's
            cosines differ from Y's more than Y's own vary, and the inverse would multiply the difference.
        rows: the most rows that "least_squares" is fitted on.
        seed: seed of the draw.

    Raises:
        ValueError: an option is unknown or out of range.
    """

    of_rows = ("anchors_x", "decoder")
    mean_x: Tensor
    anchors_x: Tensor
    decoder: Tensor
    offset: Tensor

    def __init__(
        self,
        sites: int,
        d_x: int,
        d_y: int,
        *,
        anchors: int = 512,
        decode: Decode = "least_squares",
        tolerance: float = 0.1,
        rows: int = 10_000,
        seed: int = 0,
    ) -> None:
        super().__init__(sites, d_x, d_y, rows, seed)
        check_range(least=2, most=rows, anchors=anchors)
        check_known(get_args(Decode), decode=decode)
        check_range(least=0, below=1, tolerance=tolerance)
        self.anchors = anchors
        self.decode = decode
        self.tolerance = tolerance
        self.chooses = decode == "least_squares"
        self.rows_needed = 4
        self.register_buffer("mean_x", torch.zeros(sites, 1, d_x))
        self.register_buffer("anchors_x", torch.zeros(sites, anchors, d_x))
        self.register_buffer("decoder", torch.zeros(sites, anchors, d_y))
        self.register_buffer("offset", torch.zeros(sites, 1, d_y))

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d_x) -> (S, N, d_y)."""
        return self._in_parts(self._mapped, x, self.anchors_x.shape[1])

    def _mapped(self, x: Tensor) -> Tensor:
        centred = x - self.mean_x
        relative = normalize(centred, dim=-1) @ self.anchors_x.mT
        if self.decode == "inverse":
            relative = relative * centred.norm(dim=-1, keepdim=True)
        return torch.baddbmm(self.offset, relative, self.decoder)

    def _fit(
        self, moments: Moments, kept: PairedRows, validation: PairedRows | None
    ) -> None:
        mean_x = moments.mean_x[:, None]
        anchors = self._directions(kept.x, mean_x)
        if self.decode == "inverse":
            decoder, offset = self._inverse(moments, kept.y)
        else:
            decoder, offset = self._regressed(anchors, mean_x, kept, validation)
        self.mean_x.copy_(mean_x)
        self.offset.copy_(offset)
        self._keep("anchors_x", anchors)
        self._keep("decoder", decoder)

    def _directions(self, rows: Tensor, mean: Tensor) -> Tensor:
        """Directions of the anchors, (S, m, d), out of the rows that are kept."""
        anchors = rows[:, : self.anchors]
        return normalize(anchors - mean, dim=-1)

    def _inverse(self, moments: Moments, kept_y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the decoder and the offset that undo Y's relative projection."""
        mean_y = moments.mean_y[:, None]
        anchors = self._directions(kept_y, mean_y)
        back = torch.linalg.pinv(anchors.mT, rtol=self.tolerance)
        of_x = squares(moments.xx).sum(-1)
        of_y = squares(moments.yy).sum(-1)
        ratio = (of_y / of_x).sqrt()
        return back * ratio[:, None, None], mean_y

    def _regressed(
        self,
        anchors: Tensor,
        mean_x: Tensor,
        kept: PairedRows,
        validation: PairedRows | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the decoder and the offset that ridge regression finds."""
        # r has no more directions than X: the others would be rounding
        left, sizes, _ = thin_svd(anchors)
        known = sizes > NULL * sizes[:, :1]
        basis = left * known[:, None]
        reduced = anchors.mT @ basis

        def relative(x: Tensor) -> Tensor:
            directions = normalize(x - mean_x, dim=-1)
            return directions @ reduced

        found = regression(relative, kept, validation)
        return basis @ found.weight, found.offset

    def findings(self) -> dict[str, Any]:
        """Return the number of anchors."""
        return {"anchors": self.anchors_x.shape[1]}
