"""A task: what the probes of a model's words are trained on and how, the probes, and what the report says of them."""

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
from aligners.probing.probe_bank import Bank, Examples, Variant, Words, losses


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
    """How far each variant of a bank has come.

    Attributes:
        rates: (A,) factor of its learning rate; 0: its training has ended.

    Args:
        bank: before its first step.
        loss: (A,) then, on the validation sentences.
        patience: see `ProbeTraining`.
    """

    def __init__(self, bank: Bank, loss: Tensor, patience: int) -> None:
        self._parameters = list(bank.parameters())
        self._patience = patience
        self.rates = torch.ones_like(loss)
        self._lowest = loss
        self._looks = torch.zeros_like(loss)
        self._kept = self._copies()

    def _copies(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take a step, of each variant with its own rate."""
        before = self._copies()
        optimizer.step()
        for parameter, old in zip(self._parameters, before, strict=True):
            parameter.copy_(old.lerp(parameter, _along(self.rates, parameter)))

    @torch.no_grad()
    def look(self, loss: Tensor) -> None:
        """Keep the variants whose loss is their lowest, slow down or end the others."""
        lower = (loss < self._lowest) & (self.rates > 0)
        for parameter, best in zip(self._parameters, self._kept, strict=True):
            best.copy_(parameter.where(_along(lower, parameter), best))
        self._lowest = loss.where(lower, self._lowest)
        self._looks = (self._looks + 1).where(~lower, 0)
        halved = (self.rates / 2).where(~lower, self.rates)
        self.rates = halved.where(self._looks < self._patience, 0)

    @torch.no_grad()
    def take_back(self) -> None:
        """Give every variant the weights of its lowest loss."""
        for parameter, best in zip(self._parameters, self._kept, strict=True):
            parameter.copy_(best)


def train_bank(
    bank: Bank, fitting: Examples, watched: Examples, how: ProbeTraining, seed: int
) -> None:
    """Train, all variants on the same sentences in the same order.

    Args:
        bank: changed in place; then it no longer takes gradients.
        fitting: what it learns, with states at the bank's places.
        watched: what says when a variant has learned enough, likewise.
        how: rates and lengths.
        seed: of the order.

    Raises:
        ValueError: there are no targets, or a loss is not finite.
    """
    for kind, examples in {"fitting": fitting, "validation": watched}.items():
        if not examples.sentences:
            raise UserError(
                f"Expected {kind} sentences with targets to train probes on, but got none. Give more "
                "text, or a larger `data.text.validation_share`."
            )

    epoch = max(how.least_steps, math.ceil(len(fitting.sentences) / how.batch))
    batches = _batches(fitting.sentences, how.batch, epoch * how.max_epochs, seed)
    optimizer = torch.optim.Adam(bank.parameters(), lr=how.learning_rate)
    progress = Progress(bank, losses(bank, watched), how.patience)
    for step, chosen in enumerate(batches, start=1):
        optimizer.zero_grad(set_to_none=True)
        states, part = fitting.batch(bank.places, chosen)
        loss = bank.losses(states, part).mean(1)
        if not loss.isfinite().all():
            diverged = int((~loss.isfinite()).nonzero()[0])
            raise UserError(
                f"The loss of {bank.variants[diverged]} is not finite at step {step}. "
                "Lower `training.learning_rate`."
            )
        loss.sum().backward()
        progress.step(optimizer)
        if step % epoch == 0:
            progress.look(losses(bank, watched))
            if not progress.rates.any():
                break

    progress.take_back()
    rates = progress.rates.tolist()
    bank.unfinished = [
        v for v, rate in zip(bank.variants, rates, strict=True) if rate > 0
    ]
    bank.eval().requires_grad_(False)


def ended(banks: Iterable[Bank]) -> Counter[str]:
    """How many `probes` of trained banks were still learning at the limit, `of` how many: for the report."""
    total = Counter(probes=0, of=0)
    for bank in banks:
        total["probes"] += len(bank.unfinished)
        total["of"] += len(bank.variants)
    return total


def _along(values: Tensor, parameter: Tensor) -> Tensor:
    """Values of each variant, (A,), to be combined with a parameter (A, ...)."""
    return values.view(-1, *[1] * (parameter.ndim - 1))


def _batches(
    sentences: Sequence[int], size: int, steps: int, seed: int
) -> Iterator[list[int]]:
    """Batches in an order that the seed draws anew in each epoch; all have equally many sentences."""
    draw = torch.Generator().manual_seed(seed)
    order = list[int]()
    size = min(size, len(sentences))
    for _ in range(steps):
        if len(order) < size:
            order = torch.randperm(len(sentences), generator=draw).tolist()
        chosen, order = order[:size], order[size:]
        yield [sentences[place] for place in chosen]


@dataclass
class Task(ABC):
    """A task on the fitting words of a model.

    Args:
        name: of the task.
        words: the fitting words.
        watched: the validation words.
        variants: of the bank.
        seed: of the control task and of the intervals.
        sizes: `projection` and `hidden` of edge probes.

    Attributes:
        fitting: the fitting words with their labels or trees.
        banks: trained probes of all variants, those of each `train`.
        baseline: what the report calls the answer that needs no states.
    """

    name: str
    words: Words
    watched: Words
    variants: Sequence[Variant]
    seed: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    fitting: Examples = field(init=False)
    banks: list[Bank] = field(init=False, default_factory=list)
    baseline: ClassVar[str]

    def __post_init__(self) -> None:
        self.fitting = Examples(self.words, self.annotations(self.words))

    @abstractmethod
    def annotations(self, words: Words) -> Any:
        """The labels or trees of words: see `Examples`."""

    @abstractmethod
    def fresh(self, seed: int) -> Bank:
        """Make an untrained bank."""

    @abstractmethod
    def scores(self, bank: Bank | None, held: Words) -> Any:
        """What a bank gets right in each of the held-out sentences; None: the baseline.

        It has `sentences`, their number; `about`, what the report says of them; and `measures`: from how often each
        sentence counts, (R, B), to each measure, (A, R).
        """

    @abstractmethod
    def columns(self, scores: Sequence[Any], variant: int, weights: Tensor) -> Row:
        """What the report says of a variant, or of the baseline, by its scores of each seed."""

    @abstractmethod
    def of_probe(self, scores: Sequence[Any], variant: int, weights: Tensor) -> Row:
        """What the report says besides of a variant, and not of the baseline."""

    def about(self) -> dict[str, Any]:
        """What is kept beside a bank, as plain values."""
        return {"task": self.name}

    def validation(self) -> Examples:
        """The validation words with their labels or trees."""
        return Examples(self.watched, self.annotations(self.watched))

    def train(self, how: ProbeTraining, seed: int) -> None:
        """Train a fresh bank on all fitting words, and keep it."""
        bank = self.fresh(seed)
        train_bank(bank, self.fitting, self.validation(), how, seed)
        self.banks.append(bank)

    def rows(self, held: Words) -> Iterator[Row]:
        """Rows of the report on held-out words: one of the baseline, and one for each variant that is not a control."""
        baseline = self.scores(None, held)
        scores = [self.scores(bank, held) for bank in self.banks]
        weights = resampled_counts(baseline.sentences, self.seed)
        about = {"task": self.name, **baseline.about}
        yield row_of(
            self.baseline, None, **about, **self.columns([baseline], 0, weights)
        )
        for number, variant in enumerate(self.variants):
            if variant.control:
                continue
            columns = self.columns(scores, number, weights)
            columns |= self.of_probe(scores, number, weights)
            yield row_of(variant.source, variant, **about, **columns)

    def measures(self, bank: Bank | None, held: Words, seed: int) -> dict[str, Tensor]:
        """Each measure on held-out words, then in R resamples of the sentences, (A, 1 + R).

        Args:
            bank: A trained probes; None: the baseline.
            held: the words, with states at the bank's places.
            seed: of the resampling.
        """
        scores = self.scores(bank, held)
        return scores.measures(resampled_counts(scores.sentences, seed))

    def at(self, layer: int, held: Words, seed: int) -> dict[str, Tensor]:
        """`measures` of the first bank's probe of a layer, (1, 1 + R)."""
        layers = [variant.layer for variant in self.variants]
        probe = self.banks[0].only([layers.index(layer)])
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
    """A row with all `COLUMNS`; None where nothing is known, or no finite number.

    Args:
        source: the model, its untrained twin, or a baseline.
        variant: that was scored.
        known: further columns.
    """
    cells = {"source": source, **known}
    if variant is not None:
        cells |= {"site": variant.layer, "rank": variant.rank}
    return {column: _plain(cells.get(column)) for column in COLUMNS}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def score_columns(
    name: str, values: Tensor, by_seed: Tensor | None = None
) -> dict[str, Tensor]:
    """A score with its 95 % interval over sentences and, if there are several seeds, its range over them.

    Args:
        name: of the column.
        values: (1 + R,) the score, and what it is in the resamples.
        by_seed: (S,).
    """
    columns = named(name, with_interval(values))
    if by_seed is not None:
        columns[f"{name}_seeds_low"] = by_seed.min()
        columns[f"{name}_seeds_high"] = by_seed.max()
    return columns


def pooled_ratio(numerator: Tensor, denominator: Tensor, weights: Tensor) -> Tensor:
    """A ratio of sums over sentences, in each resample.

    Args:
        numerator: (A, B).
        denominator: (A, B), or (B,).
        weights: (R, B).

    Returns:
        (A, R)
    """
    return (numerator @ weights.T) / (torch.atleast_2d(denominator) @ weights.T)
