"""Inverses and determinants of banks of square matrices, correct on every build of PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def batch_inverse(matrices: Tensor) -> Tensor:
    """(..., d, d) -> (..., d, d)."""
    return _each(torch.linalg.inv, matrices)


def batch_solve(matrices: Tensor, right: Tensor) -> Tensor:
    """A⁻¹ B for A (..., d, d) and B (..., d, k) -> (..., d, k)."""
    return _each(torch.linalg.solve, matrices, right.expand(*matrices.shape[:-2], *right.shape[-2:]))


def batch_log_det(matrices: Tensor) -> Tensor:
    """Logarithm of |det A| for A (..., d, d) -> (...)."""
    return _each(lambda matrix: torch.linalg.slogdet(matrix).logabsdet, matrices)


def _each(function: Callable[..., Tensor], *banks: Tensor) -> Tensor:
    """Apply a function that factorises by LU to every matrix.

    On the CPU one matrix at a time: with more than one thread, torch 2.13.0's LU of a batch of matrices of 256 rows or
    more fails in MKL ("Parameter 6 was incorrect on entry to SLASWP"), returns wrong pivots, or hangs. When a later
    release has fixed it, this function can call `function(*banks)` on every device.
    """
    if banks[0].device.type != "cpu":
        return function(*banks)
    lead = banks[0].shape[:-2]
    flat = [bank.reshape(-1, *bank.shape[-2:]) for bank in banks]
    found = torch.stack([function(*matrices) for matrices in zip(*flat, strict=True)])
    return found.reshape(*lead, *found.shape[1:])
