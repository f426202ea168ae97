"""Maps from one model to another through a space that both share."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.fitting.saved_bank import build_aligner, kind_of
from aligners.fitting.universe.shared_part import plain_kind
from aligners.maps.base import Aligner, mean_square
from aligners.maps.linear import Affine
from aligners.maps.solvers import least_squares
from aligners.similarity.algebra.moments import Moments, squares

SHRINKING = 1e-6  # ridge of regressions on a space in which some directions hardly vary


class ThroughSpace(Aligner):
    """g = v⁻¹ ∘ u: u maps X's states into a shared space, v maps Y's there.

    Through one space, maps compose: from X to Y and on to Z is the map from X to Z, where u and v are bijections.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        network: class and options of u, as `kind_of` gives them.
        network_y: class and options of v. Default: those of u.
        space: dimensions of the space. Default: `d_x`, which then must equal `d_y`.

    Raises:
        ValueError: the widths differ and `space` is not given, or `network` is not an invertible aligner.
    """

    invertible = both_ways = True
    needs_equal_width = True
    variance_x: Tensor
    variance_y: Tensor

    def __init__(
        self,
        sites: int,
        d_x: int,
        d_y: int,
        *,
        network: Mapping[str, Any],
        network_y: Mapping[str, Any] | None = None,
        space: int | None = None,
    ) -> None:
        self.needs_equal_width = space is None
        super().__init__(sites, d_x, d_y)
        self.space = space
        self.network = plain_kind(network)
        self.network_y = None
        if network_y is not None:
            self.network_y = plain_kind(network_y)
        into = {**self.network, "sites": sites}
        out_of = {**(self.network_y or self.network), "sites": sites}
        self.into = build_aligner({**into, "d_x": d_x, "d_y": space or d_x})
        self.out_of = build_aligner({**out_of, "d_x": d_y, "d_y": space or d_y})
        if not self.into.invertible:
            raise UserError(
                f"ThroughSpace expects an invertible `network`, but got {network['class']}."
            )
        self.bijective = self.into.bijective and self.out_of.bijective
        self.closed_form = self.into.closed_form
        self.rows_needed = self.into.rows_needed
        self.register_buffer("variance_x", torch.ones(sites))
        self.register_buffer("variance_y", torch.ones(sites))

    @classmethod
    def of(cls, into: Aligner, out_of: Aligner) -> Self:
        """Make the map from two fitted maps into one space, which it takes over.

        Args:
            into: u.
            out_of: v.
        """
        network = kind_of(into)
        network_y = kind_of(out_of)
        one_width = into.d_x == into.d_y == out_of.d_x
        composed = cls(
            into.sites,
            into.d_x,
            out_of.d_x,
            network=network,
            network_y=None if network_y == network else network_y,
            space=None if one_width else into.d_y,
        )
        composed.into.load_state_dict(into.state_dict())
        composed.out_of.load_state_dict(out_of.state_dict())
        return composed

    def forward(self, x: Tensor) -> Tensor:
        """Map rows: (S, N, d_x) -> (S, N, d_y)."""
        return self.out_of.inverse(self.into(x))

    def inverse(self, y: Tensor) -> Tensor:
        """Map rows back: (S, N, d_y) -> (S, N, d_x)."""
        return self.into.inverse(self.out_of(y))

    def fit(self, moments: Moments) -> None:
        """Fit u as a map from X to Y, and v as one from Y to itself: the space starts as Y's own."""
        mean_y = moments.mean_y
        yy = moments.yy
        self.into.fit(moments)
        self.out_of.fit(Moments(moments.n, mean_y, mean_y, yy, yy, yy))
        self.variance_x.copy_(squares(moments.xx).mean(-1) / moments.n)
        self.variance_y.copy_(squares(yy).mean(-1) / moments.n)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the FVU of g on the batch plus that of g⁻¹, (S,)."""
        if self.closed_form:
            return super().loss(x, y)
        there = mean_square(self(x) - y)
        back = mean_square(self.inverse(y) - x)
        return there / self.variance_y + back / self.variance_x

    def start_names(self) -> Sequence[str]:
        """Return the start of u at each site."""
        return self.into.start_names()

    def fan_in(self, name: str, parameter: Tensor) -> int:
        """Return the `fan_in` of u or v."""
        part, _, rest = name.partition(".")
        return getattr(self, part).fan_in(rest, parameter)

    def options(self) -> dict[str, Any]:
        """Return class and options of u and v, and the dimensions of the space."""
        options: dict[str, Any] = {"network": self.network}
        if self.network_y is not None:
            options["network_y"] = self.network_y
        if self.space is not None:
            options["space"] = self.space
        return options


class TwoLinear(Affine):
    """A linear map and a separate linear map back: two regressions, at any widths.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states, or dimensions of a space.
    """

    invertible = True

    def fit(self, moments: Moments) -> None:
        """Solve both regressions from moments, in float64."""
        there = least_squares(moments, SHRINKING)
        back = least_squares(moments.swap(), SHRINKING)
        self.set_map(moments, there, back)
