"""Matrices: the precision of products in training; inverses and determinants that are right on every PyTorch build."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from aligners.errors import UserError

Products = Literal["auto", "float32", "tf32"]
ProductPrecision = Literal["float32", "tf32"]

LEAST_CAPABILITY = 8  # the first GPUs with tf32: Ampere
SMALL = 64  # rows of a triangular matrix that is inverted by substitution


def has_tf32(device: torch.device) -> bool:
    """Whether a device multiplies in tf32: an NVIDIA GPU of compute capability 8.0 or higher."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    major, _ = torch.cuda.get_device_capability(device)
    return major >= LEAST_CAPABILITY


def precision_of(products: Products, device: torch.device) -> ProductPrecision:
    """The precision of products on a device; "auto" is tf32 wherever there is tf32.

    Raises:
        ValueError: `products` is "tf32", which the device does not have.
    """
    available = has_tf32(device)
    if products == "auto":
        return "tf32" if available else "float32"
    if products == "tf32" and not available:
        raise UserError(
            "Expected an NVIDIA GPU of compute capability 8.0 or higher for `products` tf32, but the device is "
            f"{device}. Leave `products` at auto, or set it to float32."
        )
    return products


@contextmanager
def products_in(precision: ProductPrecision) -> Iterator[None]:
    """Within it, products of float32 matrices on GPUs have this precision. Their sums are float32 in either case."""
    before = torch.get_float32_matmul_precision()
    wanted = "high" if precision == "tf32" else "highest"
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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


def by_products(x: Tensor) -> bool:
    """Whether triangular systems are solved by products with inverses: in training on a GPU.

    A triangular solve there is a hundred small kernels, and takes 4.5 times as long as a product.
    """
    return x.is_cuda and torch.is_grad_enabled()


def triangular_inverse(lower: Tensor) -> Tensor:
    """Inverses of lower triangular matrices by some thirty products, however many matrices: (..., d, d) -> (..., d, d).

    The diagonal is cut into 2^k equal blocks of at most `SMALL` rows, which are inverted all at once. Two neighbours A
    and B with C below A then become one, k times:

        [A 0; C B]⁻¹ = [A⁻¹ 0; −B⁻¹ C A⁻¹ B⁻¹].

    Reference: Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 14.2.2.
    """
    width = lower.shape[-1]
    blocks = 1
    while blocks * SMALL < width:
        blocks *= 2
    size = math.ceil(width / blocks)
    whole = blocks * size
    padded = _padded(lower, whole)

    diagonal = _blocks(padded, size, 0)
    one = identity_like(diagonal)
    one = one.expand_as(diagonal)
    inverse = torch.linalg.solve_triangular(diagonal, one, upper=False)
    while blocks > 1:
        below = _blocks(padded, size, 1)
        inverse = _in_pairs(inverse, below)
        blocks //= 2
        size *= 2
    return inverse[..., 0, :width, :width]


def _in_pairs(inverses: Tensor, below: Tensor) -> Tensor:
    """Join inverses (..., 2n, s, s) of neighbours, C being `below` (..., n, s, s): (..., n, 2s, 2s)."""
    upper_left = inverses[..., 0::2, :, :]
    lower_right = inverses[..., 1::2, :, :]
    product = lower_right @ below @ upper_left
    corner = -product
    nothing = torch.zeros_like(corner)
    top = torch.cat((upper_left, nothing), -1)
    bottom = torch.cat((corner, lower_right), -1)
    return torch.cat((top, bottom), -2)


def _padded(matrices: Tensor, width: int) -> Tensor:
    """Matrices with the identity added to their diagonal, up to a width."""
    more = width - matrices.shape[-1]
    if not more:
        return matrices
    padded = torch.nn.functional.pad(matrices, (0, more, 0, more))
    diagonal = padded.diagonal(dim1=-2, dim2=-1)
    diagonal[..., -more:] = 1
    return padded


def _blocks(matrices: Tensor, size: int, below: int) -> Tensor:
    """The blocks on the diagonal, (..., n, size, size), or with `below` 1 those right below each first of two."""
    together = 1 + below
    number = matrices.shape[-1] // size // together
    cut = (number, together, size)
    rows = matrices.unflatten(-2, cut)
    rows = rows[..., below, :, :]
    both = rows.unflatten(-1, cut)
    both = both[..., 0, :]
    blocks = both.diagonal(dim1=-4, dim2=-2)
    return blocks.movedim(-1, -3)


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
        result = function(*matrices)
        results.append(result)
    stacked = torch.stack(results)
    size = stacked.shape[1:]
    return stacked.reshape(*lead, *size)
