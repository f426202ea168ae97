"""Translation by neighbours: the mean of what Y has where X is most alike."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from aligners.errors import check_range
from aligners.maps.by_rows.kept_rows import ByRows, PairedRows
from aligners.similarity.algebra.moments import Moments


class NearestNeighbours(ByRows):
    """y = the mean of Y's rows at the k fitting rows whose X is nearest to x, by the cosine of centred rows.

    It can follow any map, and cannot leave what it has seen: images are means of fitting rows. The file holds the rows.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        k: number of neighbours.
        weighted: weigh them by their cosine, those below zero not at all, instead of equally.
        rows: the most fitting rows that are kept.
        seed: seed of their draw.

    Raises:
        ValueError: `k` is not from 1 to `rows`.
    """

    of_rows = ("kept_x", "kept_y")
    mean_x: Tensor
    kept_x: Tensor
    kept_y: Tensor

    def __init__(
        self,
        sites: int,
        d_x: int,
        d_y: int,
        *,
        k: int = 10,
        weighted: bool = False,
        rows: int = 10_000,
        seed: int = 0,
    ) -> None:
        super().__init__(sites, d_x, d_y, rows, seed)
        check_range(least=1, most=rows, k=k)
        self.k = k
        self.weighted = weighted
        self.rows_needed = max(2, k)
        self.register_buffer("mean_x", torch.zeros(sites, 1, d_x))
        self.register_buffer("kept_x", torch.zeros(sites, rows, d_x))
        self.register_buffer("kept_y", torch.zeros(sites, rows, d_y))

    def _fit(
        self, moments: Moments, kept: PairedRows, validation: PairedRows | None
    ) -> None:
        mean = moments.mean_x[:, None]
        self.mean_x.copy_(mean)
        directions = normalize(kept.x - mean, dim=-1)
        self._keep("kept_x", directions)
        self._keep("kept_y", kept.y)

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d_x) -> (S, N, d_y)."""
        rows = self.kept_x.shape[1]
        return self._in_parts(self._mapped, x, rows + self.k * self.d_y)

    def _mapped(self, x: Tensor) -> Tensor:
        directions = normalize(x - self.mean_x, dim=-1)
        cosines = directions @ self.kept_x.mT
        near, places = cosines.topk(self.k, dim=-1)
        weights = torch.ones_like(near)
        if self.weighted:
            above = near.clamp(min=0)
            total = above.sum(-1, keepdim=True)
            weights = torch.where(total > 0, above, weights)
        total = weights.sum(-1, keepdim=True)
        weights = weights / total
        images = []
        for rows, chosen, shares in zip(self.kept_y, places, weights, strict=True):
            image = shares[:, None] @ rows[chosen]
            images.append(image[:, 0])
        return torch.stack(images)
