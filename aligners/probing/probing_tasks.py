"""Tasks: what probes are trained on, how they are trained, and what a report says about them."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from aligners.errors import UserError, check_range
from aligners.injection.scoring.scores import (
    Row,
    named,
    resampled_counts,
    with_interval,
)
from aligners.probing.probe_bank import (
    Bank,
    Examples,
    Numbers,
    Variant,
    Variants,
    Words,
    losses,
)

Measures = dict[str, Tensor]  # name -> the measure of each probe


@dataclass(frozen=True)
class ProbeTraining:
    """How probes are trained: Adam, until the loss on the validation sentences stops falling.

    That loss is checked before training and after each epoch. Whenever it is not the lowest so far, the learning rate
    is halved; after `patience` such checks in a row the training ends, and the weights of the lowest loss are kept.
    Each probe of a bank has its own rate, end and weights.

    Args:
        max_epochs: the most passes over the fitting sentences. The report says how many probes were still learning at
            this limit.
        batch: sentences per step.
        learning_rate: learning rate at the start.
        patience: number of checks in a row without a lower loss after which training ends.
        least_steps: fewest optimiser steps in an epoch; if there are few sentences, an epoch reads each several times.
    """

    max_epochs: int = 60
    batch: int = 32
    learning_rate: float = 2e-3
    patience: int = 4
    least_steps: int = 25

    def __post_init__(self) -> None:
        check_range(above=0, **vars(self))

    def steps(self, sentences: int) -> int:
        """Return the number of optimiser steps in an epoch of so many sentences."""
        return max(self.least_steps, math.ceil(sentences / self.batch))


class Progress:
    """How far the training of each variant of a bank has come.

    Args:
        bank: the bank before its first step.
        loss: (A,) the bank's loss on the validation sentences.
        patience: see `ProbeTraining`.

    Attributes:
        rates: (A,) factor of each variant's learning rate; 0: its training has ended.
    """

    def __init__(self, bank: Bank, loss: Tensor, patience: int) -> None:
        self._parameters = list(bank.parameters())
        self._patience = patience
        self.rates = torch.ones_like(loss)
        self._lowest = loss
        self._checks = torch.zeros_like(loss)  # checks in a row without a lower loss
        self._kept = self._copies()

    def _copies(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take a step of the optimiser, each variant at its own learning rate."""
        before = self._copies()
        optimizer.step()
        for parameter, old in zip(self._parameters, before, strict=True):
            rates = _along(self.rates, parameter)
            stepped = old.lerp(parameter, rates)
            parameter.copy_(stepped)

    @torch.no_grad()
    def check(self, loss: Tensor) -> None:
        """Keep the weights of variants with a new lowest loss; slow down or end the others."""
        lower = (loss < self._lowest) & (self.rates > 0)
        for parameter, best in zip(self._parameters, self._kept, strict=True):
            better = _along(lower, parameter)
            best.copy_(parameter.where(better, best))

        self._lowest = loss.where(lower, self._lowest)
        checks = self._checks + 1
        self._checks = checks.where(~lower, 0)
        halved = self.rates / 2
        rates = halved.where(~lower, self.rates)
        self.rates = rates.where(self._checks < self._patience, 0)

    @torch.no_grad()
    def take_back(self) -> None:
        """Give every variant its weights of lowest loss."""
        for parameter, best in zip(self._parameters, self._kept, strict=True):
            parameter.copy_(best)


def train_bank(
    bank: Bank, fitting: Examples, watched: Examples, how: ProbeTraining, seed: int
) -> None:
    """Train all variants of a bank, on the same sentences in the same order.

    Args:
        bank: changed in place; afterwards it takes no gradients.
        fitting: examples to learn from, with states at the bank's places.
        watched: examples that decide when a variant has learned enough.
        how: learning rates and lengths of training.
        seed: seed of the order.

    Raises:
        ValueError: there are no targets, or a loss is not finite.
    """
    _check_targets("fitting", fitting)
    _check_targets("validation", watched)
    epoch = how.steps(len(fitting.sentences))
    order = _batches(fitting.sentences, how.batch, epoch * how.max_epochs, seed)
    optimizer = torch.optim.Adam(bank.parameters(), lr=how.learning_rate)
    progress = Progress(bank, losses(bank, watched), how.patience)
    for step, chosen in enumerate(order, start=1):
        optimizer.zero_grad()
        loss = _summed_loss(bank, fitting, chosen, step)
        loss.backward()
        progress.step(optimizer)
        if step % epoch == 0:
            progress.check(losses(bank, watched))
            if not progress.rates.any():
                break

    progress.take_back()
    learning = progress.rates.nonzero()[:, 0]
    bank.unfinished = [bank.variants[a] for a in learning.tolist()]
    bank.eval().requires_grad_(False)


def _check_targets(kind: str, examples: Examples) -> None:
    """Raise if no sentence has a target."""
    if not examples.sentences:
        raise UserError(
            f"Expected {kind} sentences with targets to train probes on, but got none. Give more "
            "text, or a larger `data.text.validation_share`."
        )


def _summed_loss(bank: Bank, fitting: Examples, chosen: Numbers, step: int) -> Tensor:
    """Return the loss on some sentences, summed over variants; raise if one is not finite."""
    states, part = fitting.batch(bank.places, chosen)
    loss = bank.losses(states, part).mean(1)
    diverged = (~loss.isfinite()).nonzero()
    if len(diverged):
        variant = bank.variants[int(diverged[0])]
        raise UserError(
            f"The loss of {variant} is not finite at step {step}. Lower `training.learning_rate`."
        )
    return loss.sum()


def ended(banks: Iterable[Bank]) -> Counter[str]:
    """Return, for the report, how many `probes` were still learning at the limit, and `of` how many."""
    total = Counter(probes=0, of=0)
    for bank in banks:
        total["probes"] += len(bank.unfinished)
        total["of"] += len(bank.variants)
    return total


def _along(values: Tensor, parameter: Tensor) -> Tensor:
    """Reshape values of each variant, (A,), so that they broadcast with a parameter (A, ...)."""
    others = [1] * (parameter.ndim - 1)
    return values.view(-1, *others)


def _batches(
    sentences: Numbers, size: int, steps: int, seed: int
) -> Iterator[list[int]]:
    """Yield batches of equally many sentences, in an order that is drawn anew in each epoch."""
    draw = torch.Generator().manual_seed(seed)
    order = list[int]()
    count = len(sentences)
    size = min(size, count)
    for _ in range(steps):
        if len(order) < size:
            order = torch.randperm(count, generator=draw).tolist()
        chosen = order[:size]
        order = order[size:]
        yield [sentences[place] for place in chosen]


@dataclass
class Task(ABC):
    """A task on the fitting words of a model.

    Args:
        name: name of the task.
        words: the fitting words.
        watched: the validation words.
        variants: the probes of each bank.
        seed: seed of the control task and of the intervals.
        sizes: `projection` and `hidden` of edge probes.

    Attributes:
        fitting: the fitting words with their labels or trees.
        banks: the trained bank of each call of `train`.
        baseline: the report's name for an answer that needs no states.
    """

    name: str
    words: Words
    watched: Words
    variants: Variants
    seed: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    fitting: Examples = field(init=False)
    banks: list[Bank] = field(init=False, default_factory=list)
    baseline: ClassVar[str]

    def __post_init__(self) -> None:
        annotations = self.annotations(self.words)
        self.fitting = Examples(self.words, annotations)

    @abstractmethod
    def annotations(self, words: Words) -> Any:
        """Return the labels or trees of words; see `Examples`."""

    @abstractmethod
    def fresh(self, seed: int) -> Bank:
        """Make an untrained bank."""

    @abstractmethod
    def scores(self, bank: Bank | None, held: Words) -> Any:
        """Score a bank or, with None, the baseline, on each of the held-out sentences.

        The result has `sentences`, their number; `about`, what the report says of them; and `measures`, a function that
        takes how often each sentence counts, (R, B), and returns each measure, (A, R).
        """

    @abstractmethod
    def columns(self, scores: Sequence[Any], variant: int, weights: Tensor) -> Row:
        """Return the report's columns for a variant or the baseline, given its scores of each seed."""

    @abstractmethod
    def of_probe(self, scores: Sequence[Any], variant: int, weights: Tensor) -> Row:
        """Return further columns of a variant, which the baseline does not have."""

    def about(self) -> Row:
        """Return what is saved beside a bank, as plain values."""
        return {"task": self.name}

    def validation(self) -> Examples:
        """Return the validation words with their labels or trees."""
        annotations = self.annotations(self.watched)
        return Examples(self.watched, annotations)

    def train(self, how: ProbeTraining, seed: int) -> None:
        """Train a fresh bank on all fitting words, and keep it."""
        bank = self.fresh(seed)
        watched = self.validation()
        train_bank(bank, self.fitting, watched, how, seed)
        self.banks.append(bank)

    def rows(self, held: Words) -> Iterator[Row]:
        """Return the report's rows on held-out words: one for the baseline and one for each variant but controls."""
        baseline = self.scores(None, held)
        scores = [self.scores(bank, held) for bank in self.banks]
        weights = resampled_counts(baseline.sentences, self.seed)
        about = {"task": self.name, **baseline.about}
        columns = self.columns([baseline], 0, weights)
        yield row_of(self.baseline, **about, **columns)

        for number, variant in enumerate(self.variants):
            if variant.control:
                continue
            columns = self.columns(scores, number, weights)
            columns |= self.of_probe(scores, number, weights)
            yield row_of(variant.source, variant, **about, **columns)

    def measures(self, bank: Bank | None, held: Words, seed: int) -> Measures:
        """Return each measure on held-out words, then in R resamples of the sentences, (A, 1 + R).

        Args:
            bank: a bank of A trained probes; None: the baseline.
            held: held-out words, with states at the bank's places.
            seed: seed of the resampling.
        """
        scores = self.scores(bank, held)
        weights = resampled_counts(scores.sentences, seed)
        return scores.measures(weights)

    def at(self, layer: int, held: Words, seed: int) -> Measures:
        """Return `measures` of the first bank's probe of a layer, (1, 1 + R)."""
        layers = [variant.layer for variant in self.variants]
        number = layers.index(layer)
        probe = self.banks[0].only([number])
        return self.measures(probe, held, seed)


COLUMNS = (
    *("model", "task", "probe", "source", "site", "rank", "parameters"),
    *("score", "score_low", "score_high", "score_seeds_low", "score_seeds_high"),
    *("control", "selectivity", "selectivity_low", "selectivity_high", "accuracy"),
    *("uuas", "uuas_low", "uuas_high"),
    *("root_accuracy", "root_accuracy_low", "root_accuracy_high"),
    *("centre_of_gravity", "n_sentences", "n_targets", "n_unknown"),
)


def row_of(source: str, variant: Variant | None = None, **known: Any) -> Row:
    """Return a row with all `COLUMNS`; None where a value is unknown or not finite.

    Args:
        source: the model, its untrained twin, or a baseline.
        variant: the probe that was scored; None: the baseline.
        known: further columns.
    """
    row: Row = dict.fromkeys(COLUMNS)
    row["source"] = source
    if variant is not None:
        row["site"] = variant.layer
        row["rank"] = variant.rank

    for column, value in known.items():
        if isinstance(value, Tensor):
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            value = None
        row[column] = value
    return row


def score_columns(
    name: str, values: Tensor, by_seed: Tensor | None = None
) -> dict[str, Tensor]:
    """Return a score with its 95 % interval over sentences and, where seeds are given, its range over them.

    Args:
        name: name of the column.
        values: (1 + R,) the score on the sentences as they are, and in each resample.
        by_seed: (S,) the score of each seed.
    """
    columns = named(name, with_interval(values))
    if by_seed is not None:
        columns[f"{name}_seeds_low"] = by_seed.min()
        columns[f"{name}_seeds_high"] = by_seed.max()
    return columns


def pooled_ratio(numerator: Tensor, denominator: Tensor, weights: Tensor) -> Tensor:
    """Return a ratio of sums over sentences, in each resample.

    Args:
        numerator: (A, B).
        denominator: (A, B), or (B,).
        weights: (R, B).

    Returns:
        (A, R)
    """
    denominator = torch.atleast_2d(denominator)
    return (numerator @ weights.T) / (denominator @ weights.T)
