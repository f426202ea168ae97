"""Random invertible networks: targets of which it is known that a bijection exists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from aligners.maps.inn import INN
from aligners.maps.invertible.layers import AffineCoupling, Conditioner
from aligners.similarity.algebra.moments import Moments

__all__ = ["random_inns"]

MEAN_SQUARE = 0.425  # of gelu(z), z standard normal


def random_inns(moments: Moments, strengths: Sequence[float], seeds: Sequence[int], couplings: int) -> INN:
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
    bank = INN(sites, width, width, couplings=couplings, hidden=width, mixing="none", both_ways=False)
    bank.fit(moments)
    for place, (strength, seed) in enumerate(zip(strengths, seeds, strict=True)):
        draw = torch.Generator().manual_seed(seed)
        for coupling in bank.couplings:
            _draw(cast(AffineCoupling, coupling).conditioner, place, strength, draw)
    return bank.requires_grad_(False).eval()


@torch.no_grad()
def _draw(conditioner: Conditioner, place: int, strength: float, draw: torch.Generator) -> None:
    (hidden,) = conditioner.hidden
    gains = {hidden: 1.0, conditioner.last: strength / math.sqrt(MEAN_SQUARE)}
    for layer, gain in gains.items():
        weight, bias = cast(nn.Parameter, layer.weight), cast(nn.Parameter, layer.bias)
        weight[place] = gain / math.sqrt(weight.shape[1]) * torch.randn(weight.shape[1:], generator=draw)
        bias[place] = 0
