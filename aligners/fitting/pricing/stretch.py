"""How unevenly a map stretches space: the singular values of its Jacobian."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["jacobian", "stretches"]


def jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """∂ output / ∂ input at each row, by one backward pass for each output.

    Args:
        function: (S, N, d_x) -> (S, N, d_y), each row by itself.
        x: (S, N, d_x).

    Returns:
        (S, N, d_y, d_x)
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = function(x)
        rows = [torch.autograd.grad(y[..., k].sum(), x, retain_graph=True)[0] for k in range(y.shape[-1])]
    return torch.stack(rows, -2)


def stretches(function: Callable[[Tensor], Tensor], x: Tensor, scale: Tensor) -> Tensor:
    """Quantiles 5 %, 50 % and 95 % of the singular values over rows and directions: (3, S).

    NaN at a site where the map overflows.

    Args:
        function: the map.
        x: (S, N, d_x) a sample of rows.
        scale: (S,) X's root mean variance over Y's. Between spaces of unit variance a rotation has 1, 1, 1.
    """
    found = jacobian(function, x).double()
    finite = found.isfinite().flatten(1).all(1)
    values = torch.linalg.svdvals(found.nan_to_num(0.0, 0.0, 0.0)).flatten(1) * scale[:, None].double()
    quantiles = torch.quantile(values, torch.tensor([0.05, 0.5, 0.95], dtype=values.dtype, device=values.device), 1)
    return torch.where(finite, quantiles, torch.nan)
