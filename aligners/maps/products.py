"""Precision of the networks' matrix products during training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

import torch
from torch import Tensor

from aligners.errors import UserError

Products = Literal["float32", "tf32", "bfloat16"]

_HALF: ContextVar[bool] = ContextVar("half", default=False)


def check_products(products: str) -> Products:
    """Raise if `products` is not a known precision.

    Raises:
        ValueError: naming the known ones.
    """
    for known in get_args(Products):
        if products == known:
            return known
    raise UserError(f"Expected `products` to be one of {', '.join(get_args(Products))}, but got {products!r}.")


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
    if _HALF.get():
        return (x.bfloat16() @ weight.bfloat16()).to(x.dtype) + bias
    return torch.baddbmm(bias, x, weight)
