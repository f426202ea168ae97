"""Affine couplings over a bank: the only non-linear step of an invertible network, and its inverse."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from aligners.maps.base import BankLinear

__all__ = ["AffineCoupling", "Conditioner"]


class Conditioner(nn.Module):
    """The network inside a coupling: (S, N, d_in) -> (S, N, d_out), zero at the start.

    Args:
        sites: S.
        d_in: width of its input.
        d_out: width of its output.
        hidden: width of its hidden layers.
        depth: number of hidden layers, at least 1.
    """

    def __init__(self, sites: int, d_in: int, d_out: int, hidden: int, depth: int) -> None:
        super().__init__()
        widths = [d_in] + [hidden] * depth
        self.hidden = nn.ModuleList(BankLinear(sites, a, b) for a, b in pairwise(widths))
        self.last = BankLinear(sites, hidden, d_out)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d_in) -> (S, N, d_out)."""
        for layer in self.hidden:
            x = gelu(layer(x))
        return self.last(x)


class AffineCoupling(nn.Module):
    """y_b = x_b ⊙ exp(tanh(r)) + t, where (r, t) is computed from x_a, which passes unchanged.

    The log-scale s = tanh(r) lies in [-1, 1], so neither direction can overflow. A new coupling is the identity.

    Reference: Dinh, Sohl-Dickstein and Bengio 2016, "Density estimation using Real NVP", arXiv 1605.08803,
    eq. 4-8.

    Args:
        sites: S.
        d_keep: width of x_a.
        d_change: width of x_b.
        hidden: width of the conditioner's hidden layers.
        depth: number of the conditioner's hidden layers.
    """

    def __init__(self, sites: int, d_keep: int, d_change: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.conditioner = Conditioner(sites, d_keep, 2 * d_change, hidden, depth)

    def forward(self, x_a: Tensor, x_b: Tensor) -> Tensor:
        """y_b, (S, N, d_change)."""
        return _Affine.apply(x_b, self.conditioner(x_a))

    def inverse(self, x_a: Tensor, y_b: Tensor) -> Tensor:
        """x_b, (S, N, d_change)."""
        return _InverseAffine.apply(y_b, self.conditioner(x_a))

    def log_scale(self, x_a: Tensor) -> Tensor:
        """s, (S, N, d_change); its sum over the last axis is the log-determinant of `forward`."""
        return self.conditioner(x_a).chunk(2, dim=-1)[0].tanh()


class _Affine(torch.autograd.Function):
    """x ⊙ exp(tanh(r)) + t for conditions (r, t).

    Its backward pass writes the gradient of the conditions into one tensor; autograd would make two and join them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, conditions: Tensor) -> Tensor:
        raw, shift = conditions.chunk(2, dim=-1)
        log_scale = raw.tanh()
        scale = log_scale.exp()
        ctx.save_for_backward(x, log_scale, scale)
        return torch.addcmul(shift, x, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, log_scale, scale = ctx.saved_tensors
        grad_x = grad * scale
        return grad_x, _join(grad_x * x, log_scale, grad)


class _InverseAffine(torch.autograd.Function):
    """(y − t) ⊙ exp(−tanh(r)) for conditions (r, t)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, conditions: Tensor) -> Tensor:
        raw, shift = conditions.chunk(2, dim=-1)
        log_scale = raw.tanh()
        scale = log_scale.neg().exp_()
        x = (y - shift).mul_(scale)
        ctx.save_for_backward(x, log_scale, scale)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, log_scale, scale = ctx.saved_tensors
        grad_y = grad * scale
        return grad_y, _join(grad * x, log_scale, grad_y).neg_()


def _join(grad_log_scale: Tensor, log_scale: Tensor, grad_shift: Tensor) -> Tensor:
    """Return the gradient of (r, t), given those of tanh(r) and t."""
    width = log_scale.shape[-1]
    joined = grad_shift.new_empty(*grad_shift.shape[:-1], 2 * width)
    torch.addcmul(grad_log_scale, grad_log_scale, log_scale.square(), value=-1, out=joined[..., :width])
    joined[..., width:] = grad_shift
    return joined
