"""Trains one map on rows that are in memory, with the losses, rates and clipping of `Alignment`."""

from __future__ import annotations

import torch
from torch import Tensor

from aligners.fitting.alignment import Alignment
from aligners.fitting.training import (
    Divergence,
    clip_per_site,
    gradient_norms,
    make_optimizer,
    schedule_factor,
)
from aligners.maps.base import Aligner
from aligners.maps.solving import products_in


def train_on_rows(
    aligner: Aligner, x: Tensor, y: Tensor, steps: int, a_step: int, seed: int, like: Alignment
) -> Tensor:
    """Train a map that is ready to train, on rows drawn with replacement.

    Args:
        aligner: the map, already fitted to the moments.
        x: (S, N, d_x).
        y: (S, N, d_y).
        steps: how many; the learning rate takes its whole course over them.
        a_step: rows a step.
        seed: of the rows that are drawn.
        like: whose optimiser, schedule, clipping and precision of products are used.

    Returns:
        (S,) the step at which a site diverged; 0 where none did.
    """
    optimizer = make_optimizer(like.optimizer_factory, [aligner])
    if optimizer is None:
        return torch.zeros(aligner.sites, dtype=torch.long)
    course = [
        schedule_factor(like.schedule, steps, like.warmup, group["least_rise"]) for group in optimizer.param_groups
    ]
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, course)
    divergence, parameters = Divergence(), list(aligner.parameters())
    draw = torch.Generator().manual_seed(seed)
    for step in range(steps):
        chosen = torch.randint(x.shape[1], (a_step,), generator=draw).to(x.device)
        optimizer.zero_grad(set_to_none=True)
        with products_in(like.products):
            loss = aligner.loss(x[:, chosen], y[:, chosen])
            loss.sum().backward()
        divergence.watch("map", loss, step + 1)
        norms = gradient_norms(parameters)
        clip_per_site(parameters, like.gradient_clip, norms, divergence.watch_gradient("map", norms, step + 1))
        optimizer.step()
        rate.step()
    return divergence.step["map"]
