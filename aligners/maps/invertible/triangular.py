"""A learned matrix whose inverse costs no more to apply than the matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["TriangularPair"]


class TriangularPair(nn.Module):
    """x ↦ x (I + L) (D + U): L strictly lower and U strictly upper triangular, D a positive diagonal.

    It starts at the identity, where a step can move the product in any direction. Its inverse solves two triangular
    systems, which takes as many multiplications as two matrix products; no matrix is inverted.

    Reference: Kingma and Dhariwal 2018, "Glow", arXiv 1807.03039, section 3.2.

    Args:
        sites: S.
        width: d.
    """

    def __init__(self, sites: int, width: int) -> None:
        super().__init__()
        # the diagonal holds the logarithm of D, all else is L and U
        self.entries = nn.Parameter(torch.zeros(sites, width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d) -> (S, N, d)."""
        lower, upper = self._factors()
        return x @ lower @ upper

    def inverse(self, y: Tensor) -> Tensor:
        """(S, N, d) -> (S, N, d)."""
        lower, upper = self._factors()
        y = torch.linalg.solve_triangular(upper, y, upper=True, left=False)
        return torch.linalg.solve_triangular(lower, y, upper=False, left=False, unitriangular=True)

    def log_det(self) -> Tensor:
        """The logarithm of the determinant, (S,)."""
        return self.entries.diagonal(dim1=-2, dim2=-1).sum(-1)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """I + L and D + U, each (S, d, d)."""
        diagonal = self.entries.diagonal(dim1=-2, dim2=-1)
        lower = self.entries.tril(-1) + torch.eye(diagonal.shape[-1], dtype=diagonal.dtype, device=diagonal.device)
        return lower, self.entries.triu(1) + torch.diag_embed(diagonal.exp())
