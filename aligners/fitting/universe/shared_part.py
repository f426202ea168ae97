"""Bijections of models whose widths differ: the first coordinates are shared, the rest is each model's own."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from aligners.errors import UserError
from aligners.fitting.saved_bank import build_aligner, join_banks, kind_of, moments_at, take_places
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
        self.networks = {
            width: {"class": k["class"], "options": dict(k["options"])}
            for width, k in networks.items()
        }
        a_model = sites // len(widths)
        self.of_width = {width: [i * a_model + s for i, w in enumerate(widths) if w == width for s in range(a_model)]
                         for width in dict.fromkeys(widths)}  # fmt: skip
        self.banks = nn.ModuleDict()
        for width, places in self.of_width.items():
            size = {"sites": len(places), "d_x": width, "d_y": width}
            self.banks[str(width)] = bank = build_aligner({**networks[str(width)], **size})
            if not bank.bijective:
                raise UserError(
                    f"A shared part expects bijections, but {type(bank).__name__} is none. Use INN."
                )
        for name in ("variance_x", "variance_y"):
            self.register_buffer(name, torch.ones(sites))

    @classmethod
    def of(cls, banks: Mapping[int, Aligner], widths: Sequence[int], shared: int) -> Self:
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
        a_model, width = self.sites // len(self.widths), self.widths[i]
        bank, places = self.banks[str(width)], self.of_width[width]
        start = places.index(i * a_model)
        taken = take_places(bank, slice(start, start + a_model))  # type: ignore[arg-type]
        return self.of({width: taken}, [width], self.d_y).requires_grad_(False).eval()

    def joined(self, newcomer: "SharedPart") -> "SharedPart":
        """With those of one more model, which comes last."""
        parts, widths = (
            [*(self.of_model(i) for i in range(len(self.widths))), newcomer],
            self.widths + newcomer.widths,
        )
        banks = {}
        for width in dict.fromkeys(widths):
            of_width = [
                part.banks[str(width)]
                for part, own in zip(parts, widths, strict=True)
                if own == width
            ]
            banks[width] = join_banks(of_width)  # type: ignore[arg-type]
        return self.of(banks, widths, self.d_y).requires_grad_(False).eval()

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
        part, _, rest = name.partition(".")
        return self.of_width[int(rest.partition(".")[0])] if part == "banks" else slice(None)

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
        return self.banks[width].fan_in(rest, parameter)  # type: ignore[operator]

    def _each(self) -> Iterator[tuple[int, list[int], Any]]:
        """Every width, the places that have it, and their bank."""
        for width, places in self.of_width.items():
            yield width, places, self.banks[str(width)]


def cut(moments: Moments, places: list[int] | slice, x: int, y: int) -> Moments:
    """Moments of some places, and of the first x and y dimensions; what there is not of the latter is zero."""
    n, mean_x, mean_y, xx, yy, xy = moments_at(moments, places)
    more = max(0, y - yy.shape[-1])
    mean_y, xy = (nn.functional.pad(part, (0, more)) for part in (mean_y, xy))
    yy = nn.functional.pad(yy, (0, more, 0, more))
    return Moments(n, mean_x[:, :x], mean_y[:, :y], xx[:, :x, :x], yy[:, :y, :y], xy[:, :x, :y])
