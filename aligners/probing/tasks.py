"""A task: what the probes of a model's words are trained on, the trained probes, and what the report says of them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from aligners.injection.scoring.scores import Row, named, resampled_counts, with_interval
from aligners.probing.bank import Arm, Bank, Examples, Words
from aligners.probing.training import ProbeTraining, train_bank


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
        weights, about = resampled_counts(least.sentences, self.seed), {"task": self.name, **least.about}
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
    *("accuracy", "uuas", "uuas_low", "uuas_high", "root_accuracy", "root_accuracy_low", "root_accuracy_high"),
    *("centre_of_gravity", "n_sentences", "n_targets", "n_unknown"),
)


def row_of(source: str, arm: Arm | None = None, **known: Any) -> Row:
    """A row with all `COLUMNS`; None where nothing is known, or no finite number.

    Args:
        source: the model, its untrained twin, or a baseline.
        arm: that was asked.
        known: further columns.
    """
    cells = {"source": source, "site": arm.layer if arm else None, "rank": arm.rank if arm else None, **known}
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
