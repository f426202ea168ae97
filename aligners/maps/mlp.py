"""Networks that are not bijections: a multi-layer perceptron, and two that are trained to be each other's inverse."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from aligners.errors import UserError, check_range
from aligners.maps.base import Aligner, BankLinear, Scaled, mean_square
from aligners.maps.solvers import RIDGES, ridge_regression
from aligners.similarity.algebra.moments import Moments


class MLP(Scaled):
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
            raise UserError(
                f"Expected either `hidden` or `parameters`, but got both: {list(hidden)} and {parameters}."
            )
        if hidden is None:
            hidden = [d_y] * 3
        if parameters is not None:
            of_skip = d_x * d_y if skip else 0
            hidden = [_width_for(parameters - of_skip, d_x, d_y)] * 2
        check_range(least=1, hidden=hidden or None)
        self.hidden = list(hidden)
        self.layers = nn.ModuleList()
        for d_in, d_out in pairwise([d_x, *hidden, d_y]):
            self.layers.append(BankLinear(sites, d_in, d_out))
        self.skip = None
        if skip:
            self.skip = nn.Parameter(torch.zeros(sites, d_x, d_y))
            last: Any = self.layers[-1]
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def _mapped(self, x: Tensor) -> Tensor:
        x = self.scaling.scale(x)
        h = self.layers[0](x)
        for layer in self.layers[1:]:
            h = layer(nn.functional.gelu(h))
        if self.skip is None:
            return h
        return torch.baddbmm(h, x, self.skip)

    @torch.no_grad()
    def fit(self, moments: Moments) -> None:
        """Set the scaling, and W by least squares under the ridge with the least expected error on other rows."""
        self.scaling.fit(moments)
        if self.skip is None:
            return
        weight, _ = ridge_regression(moments, RIDGES)
        scale = self.scaling.scale_x / self.scaling.scale_y
        self.skip.copy_(weight * scale.double())

    def start_names(self) -> Sequence[str]:
        """Least squares if there is a skip."""
        if self.skip is None:
            return super().start_names()
        return ["linear"] * self.sites

    def options(self) -> dict[str, Any]:
        """The hidden widths, and whether there is a skip."""
        return {"hidden": self.hidden, "skip": self.skip is not None}


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
        parameters: parameters of both networks together, as for `MLP`. Default: two of its default networks.
        cycle: c, the weight of the round trips.

    Raises:
        ValueError: `cycle` is negative, or there are too few parameters for two networks.
    """

    invertible = both_ways = True

    def __init__(
        self,
        sites: int,
        d_x: int,
        d_y: int,
        *,
        parameters: int | None = None,
        cycle: float = 1.0,
    ) -> None:
        super().__init__(sites, d_x, d_y)
        check_range(least=0, cycle=cycle)
        self.parameters_wanted = parameters
        self.cycle = cycle
        half = None if parameters is None else parameters // 2
        self.there = MLP(sites, d_x, d_y, parameters=half)
        self.back = MLP(sites, d_y, d_x, parameters=half)

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

    def loss(self, x: Tensor, y: Tensor, real: Tensor | None = None) -> Tensor:
        """FVU both ways, plus `cycle` times the squared round trips, on the rows where `real` (N,) is 1: (S,)."""
        there = self.there(x)
        back = self.back(y)
        error = self._fvu_y(there, y, real) + self._fvu_x(back, x, real)
        if not self.cycle:
            return error
        x_again = self.back(there)
        y_again = self.there(back)
        cycle = self._fvu_x(x_again, x, real) + self._fvu_y(y_again, y, real)
        return error + self.cycle * cycle

    def _fvu_x(self, found: Tensor, x: Tensor, real: Tensor | None) -> Tensor:
        """FVU of states that should be x, (S,)."""
        residual = (found - x) / self.there.scaling.scale_x
        return mean_square(residual, real)

    def _fvu_y(self, found: Tensor, y: Tensor, real: Tensor | None) -> Tensor:
        """FVU of states that should be y, (S,)."""
        residual = (found - y) / self.there.scaling.scale_y
        return mean_square(residual, real)

    def options(self) -> dict[str, Any]:
        """The size and the weight of the round trips."""
        return {"parameters": self.parameters_wanted, "cycle": self.cycle}


def _width_for(parameters: int, d_x: int, d_y: int) -> int:
    """Width h at which d_x → h → h → d_y has about `parameters` weights and biases: h² + (d_x+d_y+2)h + d_y."""
    if parameters <= 2 * (d_x + d_y):
        raise UserError(
            f"Expected `parameters` to be enough for two hidden layers between widths {d_x} and {d_y}, "
            f"but got {parameters}."
        )
    b = d_x + d_y + 2
    root = math.sqrt(b * b + 4 * (parameters - d_y))
    return max(1, round((root - b) / 2))
