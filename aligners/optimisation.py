"""What stands between a loss and a step: the learning rate's course, and clipping site by site."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

__all__ = ["Schedule", "clip_per_site", "schedule_factor"]

Schedule = Literal["constant", "linear", "cosine", "one_cycle"]


def schedule_factor(schedule: Schedule, steps: int, warmup: float) -> Callable[[int], float]:
    """Factor of the learning rate as a function of the step.

    Args:
        schedule: after a linear warm-up, `constant` stays, `linear` and `cosine` fall to zero; `one_cycle` rises
            and falls along a cosine (Smith and Topin 2017), its momentum left alone.
        steps: all training steps.
        warmup: share of them over which the factor rises to 1.
    """
    if schedule not in get_args(Schedule):
        raise ValueError(f"Expected `schedule` to be one of {', '.join(get_args(Schedule))}, but got {schedule!r}.")
    rising = warmup * steps

    def factor(step: int) -> float:
        if step < rising:
            risen = (step + 1) / (rising + 1)
            return (1 - math.cos(math.pi * risen)) / 2 if schedule == "one_cycle" else risen
        done = min(1.0, (step - rising) / max(1.0, steps - rising))
        if schedule == "constant":
            return 1.0
        return 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2

    return factor


@torch.no_grad()
def clip_per_site(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """Scale each site's gradient, over all parameters (S, ...) together, down to norm `largest`.

    Returns:
        (S,) the norms before.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0)
    norms = squares.sqrt()
    factor = (largest / (norms + 1e-12)).clamp(max=1)
    for g in gradients:
        g.mul_(factor.view(-1, *[1] * (g.ndim - 1)))
    return norms
