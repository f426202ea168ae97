"""Matrices: precision of products during training, and inverses and determinants correct on every build of PyTorch."""

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
    half = _HALF.get()
    return (
        (x.bfloat16() @ weight.bfloat16()).to(x.dtype) + bias
        if half
        else torch.baddbmm(bias, x, weight)
    )


def batch_inverse(matrices: Tensor) -> Tensor:
    """(..., d, d) -> (..., d, d)."""
    return _each(torch.linalg.inv, matrices)


def batch_solve(matrices: Tensor, right: Tensor) -> Tensor:
    """A⁻¹ B for A (..., d, d) and B (..., d, k) -> (..., d, k)."""
    return _each(
        torch.linalg.solve,
        matrices,
        right.expand(*matrices.shape[:-2], *right.shape[-2:]),
    )


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
    results = torch.stack([function(*matrices) for matrices in zip(*flat, strict=True)])
    return results.reshape(*lead, *results.shape[1:])
