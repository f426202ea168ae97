"""The arms of a bank of probes: what each of them reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from aligners.probing.words import Place, Source, Words

__all__ = ["Arm", "Readings", "needed"]

QUICKER = 10  # how much faster than other parameters the weights of a mix learn: they have far to go in few steps


class Arm(NamedTuple):
    """One probe of a bank.

    Attributes:
        source: the model, or its untrained twin.
        layer: that it reads; None: a learned mix of all.
        control: whether it is asked the control task.
        rank: of a structural probe; None: the usual one of the bank.
    """

    source: Source
    layer: int | None
    control: bool = False
    rank: int | None = None

    def reads(self, place: Place) -> bool:
        """Whether it reads what was read at a place."""
        return place.source == self.source and self.layer in (None, place.layer)


def needed(arms: Sequence[Arm], places: Sequence[Place]) -> tuple[Place, ...]:
    """The places that any arm reads.

    Raises:
        ValueError: an arm has nothing to read.
    """
    for arm in arms:
        if not any(map(arm.reads, places)):
            raise ValueError(f"Expected a place that {arm} reads, but got {', '.join(map(str, places)) or 'none'}.")
    return tuple(place for place in places if any(arm.reads(place) for arm in arms))


class Readings(nn.Module):
    """What the arms of a bank read: each a layer at unit scale, mostly centred, or a learned mix of such layers.

    The mix is γ Σ_l softmax(a)_l h_l. One number scales a layer, so that one learning rate suits all layers and
    widths.

    Args:
        arms: A, of the bank.
        places: L, of what is read.
        width: d.

    References:
        Peters et al. 2018, "Deep contextualized word representations", eq. 1; Tenney et al. 2019, "What do you learn
        from context?", §3.2.
    """

    mean: Tensor
    scale: Tensor
    read: Tensor
    mixed: Tensor

    def __init__(self, arms: Sequence[Arm], places: Sequence[Place], width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(len(places), 1, width))
        self.register_buffer("scale", torch.ones(len(places), 1, 1))
        read = torch.tensor([[arm.reads(place) for place in places] for arm in arms])
        self.register_buffer("read", read, persistent=False)
        self.register_buffer("mixed", torch.tensor([[arm.layer is None] for arm in arms]), persistent=False)
        self.mix = nn.Parameter(torch.zeros(len(arms), len(places)))
        self.gamma = nn.Parameter(torch.ones(len(arms), 1))

    def fit(self, words: Words, places: Sequence[Place], *, centred: bool) -> None:
        """Take scales, and centres if they are wanted, from words, in double precision."""
        for number, place in enumerate(places):
            states = words.states[words.places.index(place)].double()
            mean = states.mean(0, keepdim=True)
            self.mean[number] = mean if centred else 0
            self.scale[number] = (states - mean).square().mean().sqrt().clamp(min=1e-12)

    def weights(self) -> Tensor:
        """How much of each place each arm reads, (A, L), adding up to 1."""
        return (QUICKER * self.mix).masked_fill(~self.read, -torch.inf).softmax(-1)

    def forward(self, states: Tensor) -> Tensor:
        """(L, n, d) -> (A, n, d)."""
        gamma = self.gamma.where(self.mixed, 1)
        return torch.einsum("al,lnd->and", self.weights() * gamma, (states - self.mean) / self.scale)
