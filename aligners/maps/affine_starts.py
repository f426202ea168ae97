"""Starting points of trained affine maps: a closed form, the identity, or a random draw."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from aligners.maps.base import Aligner, Scaling
from aligners.maps.linear import Affine, deviations, least_squares, procrustes_rotation
from aligners.similarity.algebra.moments import Moments

__all__ = ["Start", "Started"]

Start = Literal["identity", "linear", "procrustes", "random"]


class Started(Aligner):
    """What the stitching layers share: a linear start, and the FVU as their loss on activations.

    Until `fit` or `adopt` is called, states are neither centred nor scaled, and a start that needs moments is the
    identity (at unequal widths, padded with zeros or cut).
    """

    starts: ClassVar[tuple[str, ...]] = get_args(Start)

    def __init__(self, sites: int, d_x: int, d_y: int, start: Start, ridge: float = 0.0) -> None:
        super().__init__(sites, d_x, d_y)
        name = type(self).__name__
        if start not in self.starts:
            raise ValueError(f"{name} expects `start` to be one of {', '.join(self.starts)}, but got {start!r}.")
        if start == "identity" and d_x != d_y:
            raise ValueError(
                f"{name} can start at the identity only between equal widths, but `d_x` is {d_x} and `d_y` is {d_y}. "
                'Set `start` to "linear", "procrustes" or "random".'
            )
        if ridge < 0:
            raise ValueError(f"Expected `ridge` to be zero or positive, but got {ridge:g}.")
        self.start, self.ridge = start, ridge
        self.scaling = Scaling(sites, d_x, d_y)

    @property
    def rows_needed(self) -> int:
        """For least squares, one more than there are unknowns for each output."""
        return self.d_x + 1 if self.start == "linear" else 2

    @abstractmethod
    def _mapped(self, x: Tensor) -> Tensor:
        """The map up to Y's centre and scale: (S, N, d_x) -> (S, N, d_y)."""

    @abstractmethod
    def _begin(self, weight: Tensor, offset: Tensor, moments: Moments | None) -> None:
        """Start at x ↦ (x − x̄) W + o, for W (S, d_x, d_y) and o (S, 1, d_y) in float64 and the x̄ of the scaling."""

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d_x) -> (S, N, d_y)."""
        return self.scaling.unscale_target(self._mapped(x))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """FVU of the batch at each site, (S,)."""
        return (self._mapped(x) - self.scaling.scale_target(y)).square().mean((1, 2))

    @torch.no_grad()
    def fit(self, moments: Moments) -> None:
        """Take centres, scales and the start from the moments.

        Raises:
            ValueError: the states of a site are constant or not finite, or least squares cannot be solved.
        """
        deviations(moments, constant_neurons=True)
        self.scaling.fit(moments)
        if self.start == "random":
            return
        offset = moments.mean_y
        if self.start == "identity":
            offset = moments.mean_x
            weight = torch.eye(self.d_x, dtype=torch.float64, device=offset.device).repeat(self.sites, 1, 1)
        elif self.start == "linear":
            weight = least_squares(moments, self.ridge)
        else:
            weight, _ = procrustes_rotation(moments)
        self._begin(weight, offset[:, None], moments)

    @torch.no_grad()
    def adopt(self, aligner: Aligner, moments: Moments | None = None) -> None:
        """Start at a map that is already fitted, in the place of `start`.

        Args:
            aligner: a fitted closed form (`linear`, `permutation` and `canonical` of this package) of the same sites
                and widths.
            moments: of the rows that it was fitted on, from which centres and scales are taken. Without them states
                are centred as `aligner` does and not scaled. `LowRank`, and `AffineLayer` with `norm`, need them.

        Raises:
            ValueError: the aligner is no such map, or this layer cannot start at it.
        """
        sizes, others = (self.sites, self.d_x, self.d_y), (aligner.sites, aligner.d_x, aligner.d_y)
        if not isinstance(aligner, Affine) or sizes != others:
            raise ValueError(
                f"Expected `aligner` to be a closed form (x − x̄) W + ȳ with (sites, d_x, d_y) = {sizes}, such as "
                f"Linear, Procrustes or CCA, but got {type(aligner).__name__} with {others}. Train an aligner of "
                "another kind as it is, and set `start` for the identity."
            )
        mean_x, weight, offset = (part.double() for part in (aligner.mean_x, aligner.weight, aligner.mean_y))
        if moments is None:
            self.scaling.mean_x.copy_(mean_x)
            self.scaling.mean_y.copy_(offset)
        else:
            self.scaling.fit(moments)
            offset = offset + (moments.mean_x[:, None] - mean_x) @ weight
        self._begin(weight, offset, moments)

    def start_names(self) -> Sequence[str]:
        """`start`, at every site."""
        return [self.start] * self.sites

    def options(self) -> dict[str, Any]:
        """Start and ridge."""
        return {"start": self.start, "ridge": self.ridge}

    def _scaled(self, weight: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """Convert W and o of `_begin` to centred and scaled states."""
        scaling = self.scaling
        scale_x, scale_y, mean_y = (part.double() for part in (scaling.scale_x, scaling.scale_y, scaling.mean_y))
        return weight * scale_x / scale_y, (offset - mean_y) / scale_y

    def _moments_for(self, moments: Moments | None, what: str) -> Moments:
        if moments is None:
            raise ValueError(f"{what} takes over a map by what it does to states: expected `moments`, but got none.")
        return moments
