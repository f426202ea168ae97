"""Trains a bank of probes on words in memory."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aligners.errors import UserError, check_range
from aligners.probing.bank import Bank, Examples, losses


@dataclass(frozen=True)
class ProbeTraining:
    """How probes are trained: Adam, until the loss on the validation sentences stops falling.

    That loss is looked at before training and after each epoch. Whenever a look finds none that is lower than all
    before, the learning rate is halved; after `patience` such looks in a row the training ends, and the weights of the
    lowest loss are kept. Each probe of a bank has its own rate, end and weights.

    Args:
        max_epochs: the most passes over the fitting sentences. The report says how many probes were still learning
            then.
        batch: sentences a step.
        learning_rate: learning rate at the start.
        patience: checks in a row without a lower loss, after which training ends.
        least_steps: least optimiser steps in an epoch; if there are few sentences, an epoch reads each several times.
    """

    max_epochs: int = 60
    batch: int = 32
    learning_rate: float = 2e-3
    patience: int = 4
    least_steps: int = 25

    def __post_init__(self) -> None:
        check_range(above=0, **vars(self))


class Progress:
    """How far each arm of a bank has come.

    Attributes:
        rates: (A,) factor of its learning rate; 0: its training has ended.

    Args:
        bank: before its first step.
        loss: (A,) then, on the validation sentences.
        patience: see `ProbeTraining`.
    """

    def __init__(self, bank: Bank, loss: Tensor, patience: int) -> None:
        self._parameters, self._patience = list(bank.parameters()), patience
        self.rates, self._lowest, self._looks = torch.ones_like(loss), loss, torch.zeros_like(loss)
        self._kept = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take a step, of each arm with its own rate."""
        before = [parameter.detach().clone() for parameter in self._parameters]
        optimizer.step()
        for parameter, old in zip(self._parameters, before, strict=True):
            parameter.copy_(old.lerp(parameter, _along(self.rates, parameter)))

    @torch.no_grad()
    def look(self, loss: Tensor) -> None:
        """Keep the arms whose loss is their lowest, slow down or end the others."""
        lower = (loss < self._lowest) & (self.rates > 0)
        for parameter, best in zip(self._parameters, self._kept, strict=True):
            best.copy_(parameter.where(_along(lower, parameter), best))
        self._lowest = loss.where(lower, self._lowest)
        self._looks = (self._looks + 1).where(~lower, 0)
        self.rates = (self.rates / 2).where(~lower, self.rates).where(self._looks < self._patience, 0)

    @torch.no_grad()
    def take_back(self) -> None:
        """Give every arm the weights of its lowest loss."""
        for parameter, best in zip(self._parameters, self._kept, strict=True):
            parameter.copy_(best)


def train_bank(bank: Bank, fitting: Examples, watched: Examples, how: ProbeTraining, seed: int) -> None:
    """Train, all arms on the same sentences in the same order.

    Args:
        bank: changed in place; then it no longer takes gradients.
        fitting: what it learns, with states at the bank's places.
        watched: what says when an arm has learned enough, likewise.
        how: rates and lengths.
        seed: of the order.

    Raises:
        ValueError: nothing is asked, or a loss is not finite.
    """
    for kind, examples in {"fitting": fitting, "validation": watched}.items():
        if not examples.sentences:
            raise UserError(
                f"Expected {kind} sentences with targets to train probes on, but got none. Give more "
                "text, or a larger `data.text.validation_share`."
            )
    steps = max(how.least_steps, -(-len(fitting.sentences) // how.batch))  # an epoch
    optimizer = torch.optim.Adam(bank.parameters(), lr=how.learning_rate)
    progress = Progress(bank, losses(bank, watched), how.patience)
    for step, chosen in enumerate(_batches(fitting.sentences, how.batch, steps * how.max_epochs, seed), start=1):
        optimizer.zero_grad(set_to_none=True)
        loss = bank.losses(*fitting.batch(bank.places, chosen)).mean(1)
        if not bool(loss.isfinite().all()):
            arm = bank.arms[int((~loss.isfinite()).nonzero()[0])]
            raise UserError(f"The loss of {arm} is not finite at step {step}. Lower `training.learning_rate`.")
        loss.sum().backward()
        progress.step(optimizer)
        if step % steps == 0:
            progress.look(losses(bank, watched))
            if not bool(progress.rates.any()):
                break
    progress.take_back()
    bank.unfinished = [arm for arm, rate in zip(bank.arms, progress.rates.tolist(), strict=True) if rate]
    bank.eval().requires_grad_(False)


def ended(banks: Iterable[Bank]) -> Counter[str]:
    """How many `probes` of trained banks were still learning at the limit, `of` how many: for the report."""
    every = list(banks)
    return Counter(probes=sum(len(bank.unfinished) for bank in every), of=sum(len(bank.arms) for bank in every))


def _along(values: Tensor, parameter: Tensor) -> Tensor:
    """Values of each arm, (A,), to be combined with a parameter (A, ...)."""
    return values.view(-1, *[1] * (parameter.ndim - 1))


def _batches(sentences: Sequence[int], size: int, steps: int, seed: int) -> Iterator[list[int]]:
    """Batches in an order that the seed draws anew in each epoch; all have equally many sentences."""
    draw, order = torch.Generator().manual_seed(seed), list[int]()
    size = min(size, len(sentences))
    for _ in range(steps):
        if len(order) < size:
            order = torch.randperm(len(sentences), generator=draw).tolist()
        chosen, order = order[:size], order[size:]
        yield [sentences[place] for place in chosen]
