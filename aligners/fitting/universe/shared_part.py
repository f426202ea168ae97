"""Bijections of models whose widths differ: the first coordinates are shared, the rest is each model's own."""

from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from aligners.errors import UserError
from aligners.fitting.saved_bank import (
    build_aligner,
    join_banks,
    kind_of,
    moments_at,
    take_places,
)
from aligners.maps.base import Aligner, mean_square
from aligners.similarity.algebra.moments import Moments, squares


class SharedPart(Aligner):
    """Bijections on the widths of k models, of which the first m coordinates are shared: k · S places.

    `forward` takes a state of model i to the first m coordinates of its bijection. `inverse` completes m coordinates
    with zeros and maps them back. Training makes zero the conditional mean of the model's other coordinates, given the
    shared ones. A state's m shared coordinates come back exactly from any chain of other models.

    Args:
        sites: k · S, model after model.
        d_x: the largest width; states of narrower models are padded with zeros, and come back padded.
        d_y: m.
        widths: widths of the k models.
        networks: class and options of the bijections of each width, as `kind_of` gives them.

    Raises:
        ValueError: m is above the smallest width, or a network is no bijection.
    """

    invertible = both_ways = True
    variance_x: Tensor
    variance_y: Tensor

    def __init__(
        self,
        sites: int,
        d_x: int,
        d_y: int,
        *,
        widths: Sequence[int],
        networks: Mapping[str, Mapping[str, Any]],
    ) -> None:
        super().__init__(sites, d_x, d_y)
        if not 1 <= d_y <= min(widths):
            raise UserError(
                f"Expected `shared` to be 1 to {min(widths)}, the smallest width, but got {d_y}."
            )
        self.widths = list(widths)
        self.networks = {}
        for name, kind in networks.items():
            self.networks[name] = plain_kind(kind)
        self.banks = nn.ModuleDict()
        a_model = sites // len(widths)
        self.of_width = _places_by_width(widths, a_model)
        for width, places in self.of_width.items():
            self.banks[str(width)] = self._built(width, len(places))
        self.register_buffer("variance_x", torch.ones(sites))
        self.register_buffer("variance_y", torch.ones(sites))

    def _built(self, width: int, sites: int) -> Aligner:
        """Build new bijections of a width."""
        description = dict(self.networks[str(width)])
        description["sites"] = sites
        description["d_x"] = width
        description["d_y"] = width
        bank = build_aligner(description)
        if not bank.bijective:
            raise UserError(
                f"A shared part expects bijections, but {type(bank).__name__} is none. Use INN."
            )
        return bank

    @classmethod
    def of(
        cls, banks: Mapping[int, Aligner], widths: Sequence[int], shared: int
    ) -> Self:
        """Make the shared part of given bijections.

        Args:
            banks: bijections by width.
            widths: widths of the models.
            shared: m, the number of shared coordinates.
        """
        networks = {}
        sites = 0
        for width, bank in banks.items():
            networks[str(width)] = kind_of(bank)
            sites += bank.sites
        made = cls(sites, max(widths), shared, widths=widths, networks=networks)
        for width, bank in banks.items():
            state = bank.state_dict()
            made.bank(width).load_state_dict(state)
        return made

    def bank(self, width: int) -> Aligner:
        """Return the bijections of a width."""
        return cast(Aligner, self.banks[str(width)])

    def of_model(self, i: int) -> Self:
        """Return the bijection of one model, on its own width, frozen."""
        a_model = self.sites // len(self.widths)
        width = self.widths[i]
        alike = self.of_width[width]
        start = alike.index(i * a_model)
        places = slice(start, start + a_model)
        taken = take_places(self.bank(width), places)
        part = self.of({width: taken}, [width], self.d_y)
        return part.requires_grad_(False).eval()

    @classmethod
    def joined(cls, parts: Sequence["SharedPart"]) -> Self:
        """Join shared parts of single models, in this order, into one of all, frozen."""
        widths: list[int] = []
        by_width: dict[int, list[Aligner]] = {}
        for part in parts:
            widths += part.widths
            for width in part.of_width:
                alike = by_width.setdefault(width, [])
                alike.append(part.bank(width))
        banks = {}
        for width, alike in by_width.items():
            banks[width] = join_banks(alike)
        shared = parts[0].d_y
        whole = cls.of(banks, widths, shared)
        return whole.requires_grad_(False).eval()

    def forward(self, x: Tensor) -> Tensor:
        """Map states to shared coordinates: (k · S, N, d_x) -> (k · S, N, m)."""
        rows = x.shape[1]
        out = x.new_empty(self.sites, rows, self.d_y)
        for width, places in self.of_width.items():
            own = x[places, :, :width]
            mapped = self.bank(width)(own)
            out[places] = mapped[..., : self.d_y]
        return out

    def inverse(self, y: Tensor) -> Tensor:
        """Map shared coordinates back: (k · S, N, m) -> (k · S, N, d_x)."""
        rows = y.shape[1]
        out = y.new_zeros(self.sites, rows, self.d_x)
        for width, places in self.of_width.items():
            missing = width - self.d_y
            completed = pad(y[places], (0, missing))
            states = self.bank(width).inverse(completed)
            out[places, :, :width] = states
        return out

    def fit(self, moments: Moments) -> None:
        """Start each bijection as its class does, with its model's states as both source and target."""
        self._set_variances(moments)
        for width, places in self.of_width.items():
            own = cut(moments, places, width, width)
            self.bank(width).fit(own)

    def start_at(self, moments: Moments, start: Tensor) -> None:
        """Set the untrained bijections to given linear ones.

        Args:
            moments: moments of states, and of the bijections' outputs.
            start: the bijections, as `INN.start_at` takes them, (k · S, d_x, d_x); zero beyond a model's width.
        """
        self._set_variances(moments)
        for width, places in self.of_width.items():
            own = cut(moments, places, width, width)
            of_width = start[places, :width, :width]
            bank: Any = self.bank(width)
            bank.start_at(own, of_width)

    def _set_variances(self, moments: Moments) -> None:
        x = squares(moments.xx)
        y = squares(moments.yy)[:, : self.d_y]
        variance_x = x.mean(-1) / moments.n
        variance_y = y.mean(-1) / moments.n
        self.variance_x.copy_(variance_x)
        self.variance_y.copy_(variance_y)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the FVU of the shared coordinates plus that of the states that they come from, (k · S,)."""
        there = self(x) - y
        error_y = mean_square(there)
        back = self.inverse(y) - x
        error_x = mean_square(back)
        return error_y / self.variance_y + error_x / self.variance_x

    def places(self, name: str) -> Sequence[int] | slice:
        """Return the places of the models of a width."""
        if not name.startswith("banks."):
            return slice(None)
        width = name.split(".")[1]
        return self.of_width[int(width)]

    def start_names(self) -> Sequence[str]:
        """The start at every place."""
        names = [""] * self.sites
        for width, places in self.of_width.items():
            starts = self.bank(width).start_names()
            for place, name in zip(places, starts, strict=True):
                names[place] = name
        return names

    def fan_in(self, name: str, parameter: Tensor) -> int:
        """Return the bijections' `fan_in`."""
        _, width, rest = name.split(".", 2)
        bank = self.bank(int(width))
        return bank.fan_in(rest, parameter)


def plain_kind(kind: Mapping[str, Any]) -> dict[str, Any]:
    """Return class and options of an aligner as a plain dictionary, whatever mapping they came in."""
    return {"class": kind["class"], "options": dict(kind["options"])}


def _places_by_width(widths: Sequence[int], a_model: int) -> dict[int, list[int]]:
    """Return width -> the places of the models of that width; each model has `a_model` places."""
    found: dict[int, list[int]] = {}
    for model, width in enumerate(widths):
        start = model * a_model
        places = range(start, start + a_model)
        alike = found.setdefault(width, [])
        alike.extend(places)
    return found


def cut(moments: Moments, places: list[int] | slice, x: int, y: int) -> Moments:
    """Return moments of some places, and of the first x and y dimensions; zero where the latter do not exist."""
    n, mean_x, mean_y, xx, yy, xy = moments_at(moments, places)
    missing = max(0, y - yy.shape[-1])
    mean_y = pad(mean_y, (0, missing))
    yy = pad(yy, (0, missing, 0, missing))
    xy = pad(xy, (0, missing))
    return Moments(
        n=n,
        mean_x=mean_x[:, :x],
        mean_y=mean_y[:, :y],
        xx=xx[:, :x, :x],
        yy=yy[:, :y, :y],
        xy=xy[:, :x, :y],
    )
