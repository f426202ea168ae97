"""The control of an invertible network: two free networks, one each way, that are asked to be inverses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aligners.maps.base import Aligner
from aligners.maps.mlp import MLP
from aligners.similarity.algebra.moments import Moments

__all__ = ["FreeForm"]


class FreeForm(Aligner):
    """Two MLPs, X to Y and Y to X, trained on both errors and on being each other's inverse.

    The loss is ‖f(x) − y‖² + ‖h(y) − x‖² + c (‖h(f(x)) − x‖² + ‖f(h(y)) − y‖²), in units of FVU. Nothing makes h the
    inverse of f: the round trip says how close to one training has brought it.

    Reference: Draxler et al. 2024, "Free-form Flows: Make Any Architecture a Normalizing Flow", arXiv 2310.16624, whose
    reconstruction loss this is.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        parameters: of both networks together, as for `MLP`. Default: two of its default networks.
        cycle: c, the weight of the round trips.

    Raises:
        ValueError: `cycle` is negative, or there are too few parameters for two networks.
    """

    invertible = both_ways = True

    def __init__(self, sites: int, d_x: int, d_y: int, *, parameters: int | None = None, cycle: float = 1.0) -> None:
        super().__init__(sites, d_x, d_y)
        if cycle < 0:
            raise ValueError(f"FreeForm expects `cycle` to be at least 0, but got {cycle}.")
        self.parameters_wanted, self.cycle = parameters, cycle
        each = None if parameters is None else parameters // 2
        self.there, self.back = MLP(sites, d_x, d_y, parameters=each), MLP(sites, d_y, d_x, parameters=each)

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d_x) -> (S, N, d_y)."""
        return self.there(x)

    def inverse(self, y: Tensor) -> Tensor:
        """(S, N, d_y) -> (S, N, d_x), the network of the way back; not the exact inverse of `forward`."""
        return self.back(y)

    @torch.no_grad()
    def fit(self, moments: Moments) -> None:
        """Start both networks at least squares, each in its own direction."""
        self.there.fit(moments)
        self.back.fit(moments.swap())

    def start_names(self) -> Sequence[str]:
        """Least squares."""
        return self.there.start_names()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """FVU both ways, plus `cycle` times the squared round trips: (S,)."""
        mapped, back = self.there(x), self.back(y)
        errors = (mapped - y) / self.there.scaling.scale_y, (back - x) / self.there.scaling.scale_x
        loss = torch.stack([error.square().mean((1, 2)) for error in errors]).sum(0)
        if not self.cycle:
            return loss
        cycles = (
            (self.back(mapped) - x) / self.there.scaling.scale_x,
            (self.there(back) - y) / self.there.scaling.scale_y,
        )
        return loss + self.cycle * torch.stack([error.square().mean((1, 2)) for error in cycles]).sum(0)

    def options(self) -> dict[str, Any]:
        """The size and the weight of the round trips."""
        return {"parameters": self.parameters_wanted, "cycle": self.cycle}
