"""Training of embedded models: a seed always gives the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from rich.progress import track
from torch.nn.utils import clip_grad_norm_
from transformers import get_linear_schedule_with_warmup

from aligners.models.embedded.kinds import AnyRecipe, Plan


@contextmanager
def alone(seed: int) -> Iterator[None]:
    """Within it, training is seeded and on one thread, and leaves the surrounding run as it was.

    One thread, because more would hardly speed up so small a model, and the weights would depend on their number.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with isolate_rng(), torch.enable_grad():
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def train(plan: Plan, recipe: AnyRecipe, bar: str | None) -> None:
    """Train a model on the CPU with AdamW, warm-up and linear decay; inside `alone`.

    Args:
        plan: its model is changed in place.
        recipe: learning rate, warm-up and weight decay.
        bar: how the progress bar begins; None for no bar.
    """
    model, steps = plan.model.train(), plan.epochs * len(plan.batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = get_linear_schedule_with_warmup(optimizer, int(recipe.warm_up * steps), steps)
    for epoch in range(plan.epochs):
        named = f"{bar}, epoch {epoch}/{plan.epochs - 1}"
        for batch in track(plan.batches, named, transient=True, disable=bar is None):
            optimizer.zero_grad()
            plan.loss(model, batch).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
