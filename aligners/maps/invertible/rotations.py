"""Fixed rotations that cost next to nothing and are exact in any precision."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = ["ShuffledHadamard"]

_LARGEST_BLOCK = 64


class ShuffledHadamard(nn.Module):
    """A fixed rotation: shuffle the features, flip some signs, then mix blocks of them by Hadamard matrices.

    Blocks have 4, 16 or 64 features, whose Hadamard matrices have entries ±1/2, ±1/4 and ±1/8: no entry is rounded,
    so the transpose is the inverse in any precision. If the width is no multiple of 4, up to three features are
    shuffled but not mixed. One product costs 64 d multiplications a row, not d².

    The same at every site and for every seed: it is part of the architecture, and no checkpoint holds it.

    Reference: Ailon and Chazelle 2009, "The Fast Johnson-Lindenstrauss Transform", SIAM J. Comput. 39, section 2.

    Args:
        width: d.
        number: the seed; each number gives another rotation of this width.
    """

    order: Tensor
    back: Tensor
    signs: Tensor
    block: Tensor

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(number)
        order = torch.randperm(width, generator=draw)
        for name, value in {
            "order": order,
            "back": order.argsort(),
            "signs": 2.0 * torch.randint(2, (width,), generator=draw) - 1,
            "block": _hadamard(width),
        }.items():
            self.register_buffer(name, value, persistent=False)
        self.mixed = width - width % len(self.block)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        return self._mix(_shuffle(x, self.order, self.back) * self.signs.to(x.dtype))

    def inverse(self, y: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        return _shuffle(self._mix(y) * self.signs.to(y.dtype), self.back, self.order)

    def _mix(self, x: Tensor) -> Tensor:
        """Multiply by the blocks, which are symmetric and their own inverses."""
        blocks = x[..., : self.mixed].unflatten(-1, (-1, len(self.block))) @ self.block.to(x.dtype)
        mixed = blocks.flatten(-2)
        return mixed if self.mixed == x.shape[-1] else torch.cat((mixed, x[..., self.mixed :]), -1)


def _shuffle(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    return cast(Tensor, _Shuffle.apply(x, order, back))


class _Shuffle(torch.autograd.Function):
    """Reorders features. Its backward pass shuffles, too; autograd would accumulate the gradient entry by entry."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return _taken(x, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _taken(grad, ctx.saved_tensors[0]), None, None


def _taken(x: Tensor, order: Tensor) -> Tensor:
    """Features in another order. On a CPU, `index_select` would take ten times as long along the last dimension."""
    return x.gather(-1, order.expand_as(x))


def _hadamard(width: int) -> Tensor:
    """Return the largest normalised Hadamard matrix of 4, 16 or 64 rows that fits, or else 1."""
    four = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    block = torch.ones(1, 1)
    while 4 * len(block) <= min(width, _LARGEST_BLOCK):
        block = torch.kron(block, four)
    return block
