"""Singular values and thin SVDs, by what is fastest on a device."""

from typing import Literal

import torch
from torch import Tensor

Driver = Literal["gesvd", "gesvdj", "gesvda"]

# of cuSOLVER, for all SVDs on a GPU; None: PyTorch's choice, which is gesvdj, and gesvd where that fails
DRIVER: Driver | None = None


def thin_svd(
    matrix: Tensor, driver: Driver | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """U (..., n, c), singular values (..., c), descending, and Vᵀ (..., c, m), for c = min(n, m).

    Args:
        matrix: (..., n, m).
        driver: of cuSOLVER; default: `DRIVER`. On a CPU there is no choice, and it is not used.
    """
    if not matrix.is_cuda:
        return torch.linalg.svd(matrix, full_matrices=False)
    chosen = driver or DRIVER
    return torch.linalg.svd(matrix, full_matrices=False, driver=chosen)


def singular_values(matrix: Tensor) -> Tensor:
    """Singular values of matrices (..., n, m), descending, (..., min(n, m)).

    On a GPU from `values_by_gram`: an SVD takes several times as long as an eigendecomposition there. On a CPU from
    the SVD, which without vectors takes half as long.
    """
    if matrix.is_cuda:
        return values_by_gram(matrix)
    return torch.linalg.svdvals(matrix)


def values_by_gram(matrix: Tensor) -> Tensor:
    """Singular values ρ of C from CᵀC = V ρ² Vᵀ, as the lengths of the columns of CV.

    The roots of the eigenvalues would have half of the digits: an eigenvalue is known to η ρ₁², where η is about d ε
    at most. A length is only off by the square of how far its vector is turned, at most η² ρ₁⁴ / (2ρᵢ |ρᵢ² − ρⱼ²|), if
    the other singular values are apart from it. In any case

        |error of ρᵢ| ≤ min(2η ρ₁² / ρᵢ, √(2η) ρ₁),

    which for d = 768 and ρ₁ = 1 is 1e-12 where ρᵢ is .3, 1e-10 where it is .003, and at worst 6e-7, where several small
    values lie close together. Σρᵢ² has no such error. Of float64 only.

    Args:
        matrix: C, (..., n, m).
    """
    n, m = matrix.shape[-2:]
    if n < m:
        matrix = matrix.mT
    gram = matrix.mT @ matrix
    _, vectors = torch.linalg.eigh(gram)
    images = matrix @ vectors
    lengths = torch.linalg.vector_norm(images, dim=-2)
    descending, _ = lengths.sort(dim=-1, descending=True)
    return descending
