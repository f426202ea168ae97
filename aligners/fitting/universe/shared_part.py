"""Bijections of models whose widths differ: the first coordinates are shared, the rest is each model's own."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from aligners.errors import UserError
from aligners.fitting.saved_bank import (
    build_aligner,
    join_banks,
    kind_of,
    moments_at,
    take_places,
)
from aligners.maps.base import Aligner
from aligners.similarity.algebra.moments import Moments, squares


class SharedPart(Aligner):
    """Bijections on the widths of k models, of which the first m coordinates are shared: k · S places.

    `forward` takes a state of model i to the first m coordinates of its bijection, and `inverse` completes m
    coordinates by zeros and takes them back. What training makes of the coordinates of the rest at zero is what the
    model's states have there on average, given the shared ones: a conditional mean, as curved as the network is.
    From a state through any other models and back, the m coordinates come back exactly.

    Args:
        sites: k · S, model after model.
        d_x: the largest width; states of narrower models end in zeros, and come back so.
        d_y: m.
        widths: of the k models.
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
            self.networks[name] = {
                "class": kind["class"],
                "options": dict(kind["options"]),
            }
        self.banks = nn.ModuleDict()
        self.of_width = _places_by_width(widths, sites // len(widths))
        for width, places in self.of_width.items():
            size = {"sites": len(places), "d_x": width, "d_y": width}
            bank = build_aligner({**networks[str(width)], **size})
            if not bank.bijective:
                raise UserError(
                    f"A shared part expects bijections, but {type(bank).__name__} is none. Use INN."
                )
            self.banks[str(width)] = bank
        self.register_buffer("variance_x", torch.ones(sites))
        self.register_buffer("variance_y", torch.ones(sites))

    @classmethod
    def of(
        cls, banks: Mapping[int, Aligner], widths: Sequence[int], shared: int
    ) -> Self:
        """The shared part of bijections that are there.

        Args:
            banks: by width.
            widths: of the models.
            shared: m.
        """
        networks = {str(width): kind_of(bank) for width, bank in banks.items()}
        sites = sum(bank.sites for bank in banks.values())
        made = cls(sites, max(widths), shared, widths=widths, networks=networks)
        for width, bank in banks.items():
            made.banks[str(width)].load_state_dict(bank.state_dict())
        return made

    def of_model(self, i: int) -> Self:
        """That of one model, on its own width, frozen."""
        a_model = self.sites // len(self.widths)
        width = self.widths[i]
        start = self.of_width[width].index(i * a_model)
        bank = cast(Aligner, self.banks[str(width)])
        taken = take_places(bank, slice(start, start + a_model))
        return self.of({width: taken}, [width], self.d_y).requires_grad_(False).eval()

    @classmethod
    def joined(cls, parts: Sequence["SharedPart"]) -> Self:
        """Those of single models together, frozen."""
        widths = [part.d_x for part in parts]
        banks = {}
        for width in dict.fromkeys(widths):
            name = str(width)
            of_width = [
                cast(Aligner, part.banks[name]) for part in parts if part.d_x == width
            ]
            banks[width] = join_banks(of_width)
        return cls.of(banks, widths, parts[0].d_y).requires_grad_(False).eval()

    def forward(self, x: Tensor) -> Tensor:
        """(k · S, N, d_x) -> (k · S, N, m)."""
        out = x.new_empty(*x.shape[:2], self.d_y)
        for width, places, bank in self._each():
            out[places] = bank(x[places, :, :width])[..., : self.d_y]
        return out

    def inverse(self, y: Tensor) -> Tensor:
        """(k · S, N, m) -> (k · S, N, d_x)."""
        out = y.new_zeros(*y.shape[:2], self.d_x)
        for width, places, bank in self._each():
            completed = nn.functional.pad(y[places], (0, width - self.d_y))
            out[places, :, :width] = bank.inverse(completed)
        return out

    def fit(self, moments: Moments) -> None:
        """Start each bijection as its class does, from the moments of its model's states with as many targets."""
        for bank, _, own in self._own(moments):
            bank.fit(own)

    def start_at(self, moments: Moments, start: Tensor) -> None:
        """Set the untrained bijections to given linear ones.

        Args:
            moments: of states, and of what the bijections make of them.
            start: the bijections, as `INN.start_at` takes them, (k · S, d_x, d_x); zero beyond a model's width.
        """
        for bank, places, own in self._own(moments):
            bank.start_at(own, start[places, : own.xx.shape[-1], : own.xx.shape[-1]])

    def _own(self, moments: Moments) -> Iterator[tuple[Any, list[int], Moments]]:
        """Every bank, its places, and the moments of its models; sets the variances."""
        self.variance_x.copy_(squares(moments.xx).mean(-1) / moments.n)
        self.variance_y.copy_(squares(moments.yy)[:, : self.d_y].mean(-1) / moments.n)
        for width, places, bank in self._each():
            yield bank, places, cut(moments, places, width, width)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """FVU of the shared coordinates plus that of the states that they come from, (k · S,)."""
        there = (self(x) - y).square().mean((1, 2)) / self.variance_y
        return there + (self.inverse(y) - x).square().mean((1, 2)) / self.variance_x

    def places(self, name: str) -> Sequence[int] | slice:
        """Those of the models of a width."""
        part, *rest = name.split(".")
        if part != "banks":
            return slice(None)
        return self.of_width[int(rest[0])]

    def start_names(self) -> Sequence[str]:
        """The start at every place."""
        names = [""] * self.sites
        for _, places, bank in self._each():
            for place, name in zip(places, bank.start_names(), strict=True):
                names[place] = name
        return names

    def fan_in(self, name: str, parameter: Tensor) -> int:
        """As the bijections have it."""
        _, width, rest = name.split(".", 2)
        return cast(Aligner, self.banks[width]).fan_in(rest, parameter)

    def _each(self) -> Iterator[tuple[int, list[int], Any]]:
        """Every width, the places that have it, and their bank."""
        for width, places in self.of_width.items():
            yield width, places, self.banks[str(width)]


def _places_by_width(widths: Sequence[int], a_model: int) -> dict[int, list[int]]:
    """Width -> the places of the models that have it, of which each model has `a_model`."""
    found: dict[int, list[int]] = {}
    for model, width in enumerate(widths):
        places = range(model * a_model, (model + 1) * a_model)
        found.setdefault(width, []).extend(places)
    return found


def cut(moments: Moments, places: list[int] | slice, x: int, y: int) -> Moments:
    """Moments of some places, and of the first x and y dimensions; what there is not of the latter is zero."""
    n, mean_x, mean_y, xx, yy, xy = moments_at(moments, places)
    more = max(0, y - yy.shape[-1])
    mean_y = nn.functional.pad(mean_y, (0, more))[:, :y]
    yy = nn.functional.pad(yy, (0, more, 0, more))[:, :y, :y]
    xy = nn.functional.pad(xy, (0, more))[:, :x, :y]
    return Moments(n, mean_x[:, :x], mean_y, xx[:, :x, :x], yy, xy)
