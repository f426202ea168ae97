"""Recovering a known map: states paired with random bijections of themselves."""

import math
from collections.abc import Sequence
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
from aligners.maps.inn import INN
from aligners.maps.invertible import Conditioner
from aligners.models.architectures import Component
from aligners.similarity.algebra.moments import Moments, merge_moments, moments_of

Direction = Literal["forward", "backward", "both"]
MEAN_SQUARE = 0.425  # of gelu(z), z standard normal


def random_inns(
    moments: Moments, strengths: Sequence[float], seeds: Sequence[int], couplings: int
) -> INN:
    """A bank of random networks f, one for each place, of the form of Ren et al., eq. 11 and 12.

    Each works on centred and scaled states. Its conditioners have one hidden layer of the width of the states, with
    Gaussian weights: on standard normal rows the shifts and the log-scales before tanh have a deviation near the
    strength, so that 0 is the identity.

    Args:
        moments: of x with x at each place (S, ...), for centre and scale.
        strengths: (S,) of each place.
        seeds: (S,) of each place; equal seeds give equal directions at any strength and site.
        couplings: of each network, n.
    """
    sites, _, width = moments.xx.shape
    bank = INN(
        sites, width, width, couplings=couplings, hidden=width, mixing="none", both_ways=False
    )
    bank.fit(moments)
    for place, (strength, seed) in enumerate(zip(strengths, seeds, strict=True)):
        draw = torch.Generator().manual_seed(seed)
        for coupling in bank.couplings:
            _draw(coupling.conditioner, place, strength, draw)
    return bank.requires_grad_(False).eval()


@torch.no_grad()
def _draw(conditioner: Conditioner, place: int, strength: float, draw: torch.Generator) -> None:
    (hidden,) = conditioner.hidden
    gains = {hidden: 1.0, conditioner.last: strength / math.sqrt(MEAN_SQUARE)}
    for layer, gain in gains.items():
        weight, bias = cast(nn.Parameter, layer.weight), cast(nn.Parameter, layer.bias)
        weight[place] = (
            gain / math.sqrt(weight.shape[1]) * torch.randn(weight.shape[1:], generator=draw)
        )
        bias[place] = 0


SCALED_ON = 256  # fitting texts from which centre and scale of the states are taken


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
        strengths: of the non-linearity; 0 is none. See `aligners.fitting.bijection.recovering`.
        targets: number of random networks of each strength.
        target_seed: of the first of them; the others follow.
        couplings: of each network.
        direction: of the maps: `forward`, from x to f(x); `backward`, from f(x) to x, as in the paper's text and code;
            or `both`.
        sites: as in `pair_states`, of the model with itself.
        revision: of the model on the Hub.
        options: of `PairedActivations`, by their names.

    Raises:
        ValueError: an option is out of its range.
    """
    check_range(least=0, target_seed=target_seed)
    check_range(least=1, targets=targets)
    check_known(get_args(Direction), direction=direction)
    check_range(least=2, couplings=couplings)  # one alone leaves half of the dimensions as they are
    if not strengths or min(strengths) < 0 or len(set(strengths)) < len(strengths):
        raise UserError(
            f"Expected `strengths` to be different numbers of at least 0, but got {strengths}."
        )
    seeds = range(target_seed, target_seed + targets)
    ways = ("forward", "backward") if direction == "both" else (direction,)

    def links(depths: Sequence[int], component: Component) -> list[Link]:
        pairs = parse_sites(sites, depths[0], depths[1], component)
        return [
            Link(0, 1, i, j, f"{'back/' * (way == 'backward')}{strength:g}/{seed}/",
                 f"{'X from ' * (way == 'backward')}f{seed}(X), strength {strength:g}",
                 {"strength": strength, "target_seed": seed, "direction": way})
            for way, strength, seed, (i, j) in product(ways, strengths, seeds, pairs)
        ]  # fmt: skip

    drawn = {
        "strengths": list(strengths),
        "targets": targets,
        "target_seed": target_seed,
        "couplings": couplings,
    }
    drawn["direction"] = direction

    def about(data: PairedActivations) -> dict[str, Any]:
        x = data.reader.model_x.identity()
        return {"models": {"x": x, "y": {**x, "name": f"random INNs of {x['name']}"}}, **drawn}

    networks: list[
        INN
    ] = []  # f of all places, drawn when the first states are read, whose scale they need

    def transform(data: PairedActivations, batch: PairedBatch) -> PairedBatch:
        if not networks:
            abouts = [link.about for link in data.reader.links]
            each_strength, each_seed = (
                [place[name] for place in abouts] for name in ("strength", "target_seed")
            )
            copies = len(ways) * len(strengths) * targets
            networks.append(
                random_inns(_moments(data, copies), each_strength, each_seed, couplings)
            )
        with torch.no_grad():
            x, y = batch.x, networks[0].to(batch.x.device)(batch.x)
            first = len(x) // len(ways) * (ways[0] == "forward")  # place that is fitted backward
            if first < len(x):
                x, y = torch.cat([x[:first], y[first:]]), torch.cat([y[:first], x[first:]])
            return replace(batch, x=x, y=y)

    chosen = {"model": model, "sites": sites, "revision": revision, **drawn}
    return PairedActivations(
        Pairing([(model, revision)] * 2, links, chosen, about=about, transform=transform), **options
    )


def _moments(data: PairedActivations, copies: int) -> Moments:
    """Moments of x with x at each place, `copies` for each site, from some fitting texts that all ranks read alike."""
    reader = data.reader
    sites = [i for i, _ in reader.sites[: len(reader.sites) // copies]]

    def read(texts: TextBatch) -> Moments:
        prepared = reader.prepare(texts).to(reader.model_x.device)
        x = read_rows(
            reader.model_x, prepared.texts.inputs_x, sites, prepared.rows[0], data.component
        ).cpu()
        return moments_of(x, x)

    moments = reduce(merge_moments, map(read, data.load("fit", only=SCALED_ON, alone=True)))
    return Moments(
        moments.n, *(value.repeat(copies, *[1] * (value.ndim - 1)) for value in moments[1:])
    )
