"""Trains a bank of probes on words in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from aligners.fitting.training.optimisation import make_optimizer, schedule_factor
from probing.bank import Asked, Bank
from probing.words import Words

__all__ = ["ProbeTraining", "train_bank"]


@dataclass(frozen=True)
class ProbeTraining:
    """How probes are trained: AdamW without weight decay, one cycle of the learning rate, no early stopping.

    Args:
        epochs: over the fitting sentences.
        batch: sentences a step.
        learning_rate: the highest, of matrices with up to 64 inputs; see `make_optimizer`.
        least_steps: of the optimiser, if so many epochs have fewer.
    """

    epochs: int = 5
    batch: int = 32
    learning_rate: float = 2e-3
    least_steps: int = 200

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "learning_rate", "least_steps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Expected `{name}` of the training to be above 0, but got {getattr(self, name)}.")

    def steps(self, sentences: int) -> int:
        """Number of steps on so many sentences."""
        return max(self.least_steps, self.epochs * -(-sentences // self.batch))


def train_bank(bank: Bank, words: Words, asked: Asked, how: ProbeTraining, seed: int) -> None:
    """Train, all arms on the same sentences in the same order.

    Args:
        bank: changed in place; then it no longer takes gradients.
        words: with states at the bank's places.
        asked: of them.
        how: rates and lengths.
        seed: of the order.

    Raises:
        ValueError: nothing is asked, or a loss is not finite.
    """
    if not asked.sentences:
        raise ValueError("Expected sentences of which something is asked to train probes on, but got none.")
    steps = how.steps(len(asked.sentences))
    factory = partial(torch.optim.AdamW, lr=how.learning_rate, weight_decay=0.0)
    optimizer = cast(torch.optim.Optimizer, make_optimizer(factory, [bank]))  # there are parameters
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule_factor("one_cycle", steps, 0.15))
    for step, chosen in enumerate(_batches(asked.sentences, how.batch, steps, seed), start=1):
        optimizer.zero_grad(set_to_none=True)
        loss = bank.loss(words.read(bank.places, chosen), asked.part(words, chosen))
        if not bool(loss.isfinite().all()):
            arm = bank.arms[int((~loss.isfinite()).nonzero()[0])]
            raise ValueError(f"The loss of {arm} is not finite at step {step}. Lower `training.learning_rate`.")
        loss.sum().backward()
        optimizer.step()
        rate.step()
    bank.eval().requires_grad_(False)


def _batches(sentences: Sequence[int], size: int, steps: int, seed: int) -> Iterator[list[int]]:
    """Batches in an order that the seed draws anew in each epoch; all have equally many sentences."""
    draw, order = torch.Generator().manual_seed(seed), list[int]()
    size = min(size, len(sentences))
    for _ in range(steps):
        if len(order) < size:
            order = torch.randperm(len(sentences), generator=draw).tolist()
        chosen, order = order[:size], order[size:]
        yield [sentences[place] for place in chosen]
