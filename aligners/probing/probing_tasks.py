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
from aligners.injection.scoring.scores import Row, named, resampled_counts, with_interval
from aligners.probing.probe_bank import Arm, Bank, Examples, Words, losses


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
        self.rates = (
            (self.rates / 2).where(~lower, self.rates).where(self._looks < self._patience, 0)
        )

    @torch.no_grad()
    def take_back(self) -> None:
        """Give every arm the weights of its lowest loss."""
        for parameter, best in zip(self._parameters, self._kept, strict=True):
            parameter.copy_(best)


def train_bank(
    bank: Bank, fitting: Examples, watched: Examples, how: ProbeTraining, seed: int
) -> None:
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
    for step, chosen in enumerate(
        _batches(fitting.sentences, how.batch, steps * how.max_epochs, seed), start=1
    ):
        optimizer.zero_grad(set_to_none=True)
        loss = bank.losses(*fitting.batch(bank.places, chosen)).mean(1)
        if not bool(loss.isfinite().all()):
            arm = bank.arms[int((~loss.isfinite()).nonzero()[0])]
            raise UserError(
                f"The loss of {arm} is not finite at step {step}. Lower `training.learning_rate`."
            )
        loss.sum().backward()
        progress.step(optimizer)
        if step % steps == 0:
            progress.look(losses(bank, watched))
            if not bool(progress.rates.any()):
                break
    progress.take_back()
    bank.unfinished = [
        arm for arm, rate in zip(bank.arms, progress.rates.tolist(), strict=True) if rate
    ]
    bank.eval().requires_grad_(False)


def ended(banks: Iterable[Bank]) -> Counter[str]:
    """How many `probes` of trained banks were still learning at the limit, `of` how many: for the report."""
    every = list(banks)
    return Counter(
        probes=sum(len(bank.unfinished) for bank in every), of=sum(len(bank.arms) for bank in every)
    )


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


@dataclass
class Task(ABC):
    """A task on the fitting words of a model.

    Args:
        name: of the task.
        words: the fitting words.
        watched: the validation words.
        arms: of the bank.
        seed: of the control task and of the intervals.
        sizes: `projection` and `hidden` of edge probes.

    Attributes:
        fitting: the fitting words with their labels or trees.
        banks: trained probes of all arms, those of each `train`.
        baseline: what the report calls the answer that needs no states.
    """

    name: str
    words: Words
    watched: Words
    arms: Sequence[Arm]
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
    def columns(self, scores: Sequence[Any], arm: int, weights: Tensor) -> Row:
        """What the report says of an arm, or of the baseline, by its scores of each seed."""

    @abstractmethod
    def of_probe(self, scores: Sequence[Any], arm: int, weights: Tensor) -> Row:
        """What the report says besides of an arm, and not of the baseline."""

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
        """Rows of the report on held-out words: one of the baseline, and one for each arm that is not a control."""
        scores, least = [self.scores(bank, held) for bank in self.banks], self.scores(None, held)
        weights, about = (
            resampled_counts(least.sentences, self.seed),
            {"task": self.name, **least.about},
        )
        yield row_of(self.baseline, None, **about, **self.columns([least], 0, weights))
        for a, arm in enumerate(self.arms):
            if not arm.control:
                figures = self.columns(scores, a, weights) | self.of_probe(scores, a, weights)
                yield row_of(arm.source, arm, **about, **figures)

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
        arm = next(a for a, arm in enumerate(self.arms) if arm.layer == layer)
        return self.measures(self.banks[0].only([arm]), held, seed)


COLUMNS = (
    *("model", "task", "probe", "source", "site", "rank", "parameters"),
    *("score", "score_low", "score_high", "score_seeds_low", "score_seeds_high"),
    *("control", "selectivity", "selectivity_low", "selectivity_high"),
    *(
        "accuracy",
        "uuas",
        "uuas_low",
        "uuas_high",
        "root_accuracy",
        "root_accuracy_low",
        "root_accuracy_high",
    ),
    *("centre_of_gravity", "n_sentences", "n_targets", "n_unknown"),
)


def row_of(source: str, arm: Arm | None = None, **known: Any) -> Row:
    """A row with all `COLUMNS`; None where nothing is known, or no finite number.

    Args:
        source: the model, its untrained twin, or a baseline.
        arm: that was asked.
        known: further columns.
    """
    cells = {
        "source": source,
        "site": arm.layer if arm else None,
        "rank": arm.rank if arm else None,
        **known,
    }
    return {column: _plain(cells.get(column)) for column in COLUMNS}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def score_columns(name: str, values: Tensor, by_seed: Tensor | None = None) -> dict[str, Tensor]:
    """A score with its 95 % interval over sentences and, if there are several seeds, its range over them.

    Args:
        name: of the column.
        values: (1 + R,) the score, and what it is in the resamples.
        by_seed: (S,).
    """
    columns = named(name, with_interval(values))
    if by_seed is not None:
        columns |= {f"{name}_seeds_low": by_seed.min(), f"{name}_seeds_high": by_seed.max()}
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
