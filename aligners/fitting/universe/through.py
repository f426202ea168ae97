"""A map from one model to another through a space that both have a bijection into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from aligners.fitting.storage.describing import build_aligner, describe_aligner
from aligners.maps.base import Aligner
from aligners.similarity.algebra.moments import Moments

__all__ = ["ThroughSpace"]


class ThroughSpace(Aligner):
    """g = v⁻¹ ∘ u: u takes X's states into a shared space, v takes Y's there.

    Through one space, maps compose: from X to Y and on to Z is the map from X to Z.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states, equal to `d_x`.
        network: class and options of u and v, as `describe_aligner` gives them.

    Raises:
        ValueError: the widths differ, or `network` is not an invertible aligner.
    """

    invertible = both_ways = True
    needs_equal_width = True
    variance_x: Tensor
    variance_y: Tensor

    def __init__(self, sites: int, d_x: int, d_y: int, *, network: Mapping[str, Any]) -> None:
        super().__init__(sites, d_x, d_y)
        self.network = {"class": network["class"], "options": dict(network["options"])}
        size = {"sites": sites, "d_x": d_x, "d_y": d_y}
        self.into, self.out_of = (build_aligner({**self.network, **size}) for _ in range(2))
        if not self.into.invertible:
            raise ValueError(f"ThroughSpace expects an invertible `network`, but got {network['class']}.")
        self.bijective, self.closed_form = self.into.bijective, self.into.closed_form
        self.register_buffer("variance_x", torch.ones(sites))
        self.register_buffer("variance_y", torch.ones(sites))

    @classmethod
    def of(cls, into: Aligner, out_of: Aligner) -> Self:
        """The map by two fitted bijections of one kind, which it takes over.

        Args:
            into: u.
            out_of: v.
        """
        network = describe_aligner(into)
        made = cls(into.sites, into.d_x, out_of.d_x, network=network)
        made.into.load_state_dict(into.state_dict())
        made.out_of.load_state_dict(out_of.state_dict())
        return made

    @property
    def rows_needed(self) -> int:
        """What u needs."""
        return self.into.rows_needed

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d) -> (S, N, d)."""
        return self.out_of.inverse(self.into(x))

    def inverse(self, y: Tensor) -> Tensor:
        """(S, N, d) -> (S, N, d)."""
        return self.into.inverse(self.out_of(y))

    def fit(self, moments: Moments) -> None:
        """Fit u as a map from X to Y, and v as one from Y to itself: the space begins as Y's own."""
        own = Moments(moments.n, *(moments.mean_y,) * 2, *(moments.yy,) * 3)
        self.into.fit(moments)
        self.out_of.fit(own)
        for kept, scatter in ((self.variance_x, moments.xx), (self.variance_y, moments.yy)):
            kept.copy_(scatter.diagonal(dim1=-2, dim2=-1).mean(-1) / moments.n)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """FVU of g on the batch plus that of g⁻¹, (S,)."""
        if self.closed_form:
            return super().loss(x, y)
        there = (self(x) - y).square().mean((1, 2)) / self.variance_y
        return there + (self.inverse(y) - x).square().mean((1, 2)) / self.variance_x

    def start_names(self) -> Sequence[str]:
        """The start of u at each site."""
        return self.into.start_names()

    def fan_in(self, name: str, parameter: Tensor) -> int:
        """As u or v has it."""
        part, _, own = name.partition(".")
        return getattr(self, part).fan_in(own, parameter)

    def options(self) -> dict[str, Any]:
        """Class and options of u and v."""
        return {"network": self.network}
