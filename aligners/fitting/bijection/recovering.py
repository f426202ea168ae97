"""Recovering a known map: states paired with random bijections of themselves."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import product
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.paired_activations import PairedActivations, Pairing
from aligners.datamodules.rows.read_rows import Link, PairedBatch, read_rows
from aligners.datamodules.rows.sites import parse_sites
from aligners.errors import UserError, check_known, check_range
from aligners.maps.couplings import Conditioner
from aligners.maps.inn import INN
from aligners.models.architectures import Component
from aligners.similarity.algebra.moments import Moments, merge_moments, moments_of

Direction = Literal["forward", "backward", "both"]
MEAN_SQUARE = 0.425  # deviation of gelu(z), for standard normal z


def random_inns(
    moments: Moments, strengths: Sequence[float], seeds: Sequence[int], couplings: int
) -> INN:
    """Make a bank of random networks f, one for each place, of the form of Ren et al., eq. 11 and 12.

    Each works on centred and scaled states. Its conditioners have one hidden layer of the width of the states, with
    Gaussian weights: on standard normal rows the shifts and the log-scales before tanh have a deviation near the
    strength, so that 0 is the identity.

    Args:
        moments: moments of x paired with itself at each place (S, ...), for centre and scale.
        strengths: (S,) strength of each place.
        seeds: (S,) seed of each place; equal seeds give equal directions at any strength and site.
        couplings: n, the number of couplings of each network.
    """
    sites, _, width = moments.xx.shape
    bank = INN(
        sites,
        width,
        width,
        couplings=couplings,
        hidden=width,
        mixing="none",
        both_ways=False,
    )
    bank.fit(moments)
    for place, (strength, seed) in enumerate(zip(strengths, seeds, strict=True)):
        draw = torch.Generator().manual_seed(seed)
        for coupling in bank.couplings:
            _draw(coupling.conditioner, place, strength, draw)
    return bank.requires_grad_(False).eval()


@torch.no_grad()
def _draw(
    conditioner: Conditioner, place: int, strength: float, draw: torch.Generator
) -> None:
    (hidden,) = conditioner.hidden
    gains = {hidden: 1.0, conditioner.last: strength / math.sqrt(MEAN_SQUARE)}
    for layer, gain in gains.items():
        weight = cast(nn.Parameter, layer.weight)
        bias = cast(nn.Parameter, layer.bias)
        weight[place] = (
            gain
            / math.sqrt(weight.shape[1])
            * torch.randn(weight.shape[1:], generator=draw)
        )
        bias[place] = 0


SCALED_ON = 256  # fitting texts that determine centre and scale of the states


class RandomTargets(Pairing):
    """Pairs a model with random bijections of its own states, drawn once the first states give the scale."""

    def __init__(
        self, named: list[tuple[str, str | None]], options: Mapping[str, Any]
    ) -> None:
        super().__init__(named, options)
        way = self.options["direction"]
        self.ways = ["forward", "backward"] if way == "both" else [way]
        first = self.options["target_seed"]
        self.seeds = range(first, first + self.options["targets"])
        self.networks: INN | None = None  # f of all places

    def links(self, depths: Sequence[int], component: Component) -> list[Link]:
        """Return a place for every direction, strength, target and site, in this order."""
        sites = parse_sites(self.options["sites"], depths[0], depths[1], component)
        links = []
        for way, strength, seed in product(
            self.ways, self.options["strengths"], self.seeds
        ):
            begins = f"{strength:g}/{seed}/"
            called = f"f{seed}(X), strength {strength:g}"
            if way == "backward":
                begins = f"back/{begins}"
                called = f"X from {called}"
            about = {"strength": strength, "target_seed": seed, "direction": way}
            links += [Link(0, 1, i, j, begins, called, about) for i, j in sites]
        return links

    def describe(self, data: PairedActivations) -> dict[str, Any]:
        """Describe the model, and how its targets were drawn."""
        x = data.reader.model_x.identity()
        drawn = ("strengths", "targets", "target_seed", "couplings", "direction")
        return {
            "models": {"x": x, "y": {**x, "name": f"random INNs of {x['name']}"}},
            **{name: self.options[name] for name in drawn},
        }

    def transform(self, data: PairedActivations, batch: PairedBatch) -> PairedBatch:
        """Put f(x) in place of y, and swap the two where maps are fitted backward."""
        if self.networks is None:
            self.networks = self._draw(data)
        with torch.no_grad():
            x = batch.x
            y = self.networks.to(batch.x.device)(batch.x)
            backward = 0  # first place that is fitted backward
            if self.ways[0] == "forward":
                backward = len(x) // len(self.ways)
            if backward < len(x):
                x, y = (
                    torch.cat([x[:backward], y[backward:]]),
                    torch.cat([y[:backward], x[backward:]]),
                )
            return replace(batch, x=x, y=y)

    def _draw(self, data: PairedActivations) -> INN:
        """Draw f of all places."""
        abouts = [link.about for link in data.reader.links]
        strengths = [about["strength"] for about in abouts]
        seeds = [about["target_seed"] for about in abouts]
        copies = len(self.ways) * len(self.options["strengths"]) * len(self.seeds)
        return random_inns(
            _moments(data, copies), strengths, seeds, self.options["couplings"]
        )


def target_states(
    model: str = "embedded:0",
    strengths: list[float] = [0.1, 0.3, 1.0],  # noqa: B006  (copied)
    targets: int = 1,
    target_seed: int = 0,
    couplings: int = 4,
    direction: Direction = "forward",
    sites: str | list[str | int] = "blocks",
    revision: str | None = None,
    **options: Any,
) -> PairedActivations:
    """Pair the states x of a model with f(x), where f is a random invertible network (Ren et al. 2023, §4.3).

    A bijection from X to Y exists then, and is known: what a map leaves unexplained is its own failure. Every strength,
    every target and every direction is one more place for each site, so that all are fitted in one run.

    Args:
        model: X, as in `pair_states`.
        strengths: strengths of the non-linearity; 0 is none. See `aligners.fitting.bijection.recovering`.
        targets: number of random networks of each strength.
        target_seed: seed of the first of them; the others follow.
        couplings: number of couplings of each network.
        direction: direction of the maps: `forward`, from x to f(x); `backward`, from f(x) to x, as in the paper's text
            and code; or `both`.
        sites: as in `pair_states`, of the model with itself.
        revision: revision of the model on the Hub.
        options: options of `PairedActivations`, by their names.

    Raises:
        ValueError: an option is out of its range.
    """
    check_range(least=0, target_seed=target_seed)
    check_range(least=1, targets=targets)
    check_known(get_args(Direction), direction=direction)
    check_range(
        least=2, couplings=couplings
    )  # a single one leaves half of the dimensions unchanged
    if not strengths or min(strengths) < 0 or len(set(strengths)) < len(strengths):
        raise UserError(
            f"Expected `strengths` to be different numbers of at least 0, but got {strengths}."
        )
    chosen = {
        "model": model,
        "sites": sites,
        "revision": revision,
        "strengths": list(strengths),
        "targets": targets,
        "target_seed": target_seed,
        "couplings": couplings,
        "direction": direction,
    }
    return PairedActivations(RandomTargets([(model, revision)] * 2, chosen), **options)


def _moments(data: PairedActivations, copies: int) -> Moments:
    """Return moments of x with itself, `copies` for each site, from some fitting texts, the same on all ranks."""
    reader = data.reader
    sites = [i for i, _ in reader.sites[: len(reader.sites) // copies]]

    def read(texts: TextBatch) -> Moments:
        prepared = reader.prepare(texts).to(reader.model_x.device)
        x = read_rows(
            reader.model_x,
            prepared.texts.inputs_x,
            sites,
            prepared.rows[0],
            data.component,
        ).cpu()
        return moments_of(x, x)

    moments = reduce(
        merge_moments, map(read, data.load("fit", only=SCALED_ON, alone=True))
    )
    return Moments(
        moments.n,
        *(value.repeat(copies, *[1] * (value.ndim - 1)) for value in moments[1:]),
    )
