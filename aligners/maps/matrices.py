"""Matrices: the precision of products in training; inverses and determinants that are right on every PyTorch build."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from torch import Tensor

Products = Literal["float32", "tf32", "bfloat16"]

_HALF: ContextVar[bool] = ContextVar("half", default=False)


@contextmanager
def products_in(products: Products) -> Iterator[None]:
    """Within it, `bank_product` uses this precision; tf32 affects all float32 products on GPUs. Sums stay float32."""
    before = torch.get_float32_matmul_precision()
    token = _HALF.set(products == "bfloat16")
    if products == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        _HALF.reset(token)
        torch.set_float32_matmul_precision(before)


def bank_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """X W + b of a bank: (S, N, d_in), (S, d_in, d_out) and (S, 1, d_out) -> (S, N, d_out)."""
    if not _HALF.get():
        return torch.baddbmm(bias, x, weight)
    product = x.bfloat16() @ weight.bfloat16()
    precise = product.to(x.dtype)
    return precise + bias


def identity_like(matrix: Tensor) -> Tensor:
    """I of the size, type and device of a matrix (..., a, b): (a, b), with zeros beside it where that is not square."""
    rows, columns = matrix.shape[-2:]
    return torch.eye(rows, columns, dtype=matrix.dtype, device=matrix.device)


def picked(candidates: Tensor, chosen: Tensor) -> Tensor:
    """Take one of C candidates for each site: (C, S, ...) and numbers (S,) -> (S, ...)."""
    sites = torch.arange(len(chosen), device=chosen.device)
    return candidates[chosen, sites]


def batch_inverse(matrices: Tensor) -> Tensor:
    """(..., d, d) -> (..., d, d)."""
    return _each(torch.linalg.inv, matrices)


def batch_solve(matrices: Tensor, right: Tensor) -> Tensor:
    """A⁻¹ B for A (..., d, d) and B (..., d, k) -> (..., d, k)."""
    lead = matrices.shape[:-2]
    size = right.shape[-2:]
    rights = right.expand(*lead, *size)
    return _each(torch.linalg.solve, matrices, rights)


def batch_log_det(matrices: Tensor) -> Tensor:
    """Logarithm of |det A| for A (..., d, d) -> (...)."""
    return _each(_log_det, matrices)


def _log_det(matrices: Tensor) -> Tensor:
    """Logarithm of |det A|."""
    return torch.linalg.slogdet(matrices).logabsdet


def _each(function: Callable[..., Tensor], *banks: Tensor) -> Tensor:
    """Apply a function that factorises by LU to every matrix.

    On the CPU one matrix at a time: with more than one thread, torch 2.13.0's LU of a batch of matrices of 256 rows or
    more fails in MKL ("Parameter 6 was incorrect on entry to SLASWP"), returns wrong pivots, or hangs. When a later
    release has fixed it, this function can call `function(*banks)` on every device.
    """
    if banks[0].device.type != "cpu":
        return function(*banks)
    lead = banks[0].shape[:-2]
    flat = []
    for bank in banks:
        size = bank.shape[-2:]
        flat.append(bank.reshape(-1, *size))
    results = []
    for matrices in zip(*flat, strict=True):
        results.append(function(*matrices))
    stacked = torch.stack(results)
    size = stacked.shape[1:]
    return stacked.reshape(*lead, *size)
