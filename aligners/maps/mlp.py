"""The comparison without bijectivity: a multi-layer perceptron from X's states to Y's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from aligners.maps.base import Aligner, BankLinear, Scaling
from aligners.maps.linear import predictive_least_squares
from aligners.similarity.algebra.moments import Moments

__all__ = ["MLP"]


class MLP(Aligner):
    """Linear layers with GELU between them, plus a linear map of their input.

    y = x W + f(x): W starts at least squares and the last layer of f at zero, so the MLP is as good as the linear map
    before its first step, at any width. Without the skip it is the sanity check of Ren et al. (Table 4).

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        hidden: widths of the hidden layers of f. The default, three of width d_y, is the paper's network of four
            linear layers of width d.
        parameters: instead of `hidden`, for comparisons at equal size: two hidden layers of one width, chosen so that
            a site has as nearly this many parameters as possible, W included.
        skip: whether there is a W. Without it, as in the paper, the weights start at random.
    """

    def __init__(
        self,
        sites: int,
        d_x: int,
        d_y: int,
        *,
        hidden: Sequence[int] | None = None,
        parameters: int | None = None,
        skip: bool = True,
    ) -> None:
        super().__init__(sites, d_x, d_y)
        if hidden is not None and parameters is not None:
            raise ValueError(
                f"Expected `hidden` or `parameters`, but got both: {list(hidden)} and {parameters}. Leave one out."
            )
        if parameters is not None:
            hidden = [_width_for(parameters - skip * d_x * d_y, d_x, d_y)] * 2
        self.hidden = list(hidden) if hidden is not None else [d_y] * 3
        if any(width < 1 for width in self.hidden):
            raise ValueError(f"Expected every width in `hidden` to be at least 1, but got {self.hidden}.")
        self.scaling = Scaling(sites, d_x, d_y)
        widths = [d_x, *self.hidden, d_y]
        self.layers = nn.ModuleList(BankLinear(sites, a, b) for a, b in pairwise(widths))
        self.skip = nn.Parameter(torch.zeros(sites, d_x, d_y)) if skip else None
        if skip:
            last = cast(BankLinear, self.layers[-1])
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def _scaled(self, x: Tensor) -> Tensor:
        x = self.scaling.scale(x)
        h = self.layers[0](x)
        for layer in self.layers[1:]:
            h = layer(nn.functional.gelu(h))
        return h if self.skip is None else torch.baddbmm(h, x, self.skip)

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d_x) -> (S, N, d_y)."""
        return self.scaling.unscale_target(self._scaled(x))

    @torch.no_grad()
    def fit(self, moments: Moments) -> None:
        """Set the scaling, and W by least squares under the ridge with the least expected error on other rows."""
        self.scaling.fit(moments)
        if self.skip is not None:
            scale = (self.scaling.scale_x / self.scaling.scale_y).double()
            self.skip.copy_(predictive_least_squares(moments) * scale)

    def start_names(self) -> Sequence[str]:
        """Least squares if there is a skip."""
        return super().start_names() if self.skip is None else ["linear"] * self.sites

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """FVU of the batch at each site, (S,)."""
        return (self._scaled(x) - self.scaling.scale_target(y)).square().mean((1, 2))

    def options(self) -> dict[str, Any]:
        """The hidden widths, and whether there is a skip."""
        return {"hidden": self.hidden, "skip": self.skip is not None}


def _width_for(parameters: int, d_x: int, d_y: int) -> int:
    """Width h at which d_x → h → h → d_y has about `parameters` weights and biases: h² + (d_x+d_y+2)h + d_y."""
    if parameters <= 2 * (d_x + d_y):
        raise ValueError(
            f"Expected `parameters` to be enough for two hidden layers between widths {d_x} and {d_y}, "
            f"but got {parameters}."
        )
    b = d_x + d_y + 2
    return max(1, round((-b + math.sqrt(b * b + 4 * (parameters - d_y))) / 2))
