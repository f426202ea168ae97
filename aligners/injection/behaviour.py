"""What Y does with states that are put into it, text by text, and the columns that a report makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from aligners.injection.forward import bank_logits
from aligners.injection.routes import Route
from aligners.injection.scoring.answers import one_after_another
from aligners.injection.scoring.asked import Asked
from aligners.injection.scoring.scores import bootstrap_interval
from aligners.injection.scoring.task_scores import ScoredTask, score_interval, task_score
from aligners.injection.scoring.tasks import chosen, per_text, unit_answers, unit_scores
from aligners.models.model import FrozenModel
from datamodules.asking import TaskBatch

__all__ = ["BEHAVIOUR", "BEHAVIOUR_COLUMNS", "OF_LABELS", "OF_TOKENS", "Answered", "Behaviour", "behaviour_columns"]

BEHAVIOUR = ["correct", "loss", "agree", "answer", "units"]
BEHAVIOUR_COLUMNS = (
    "accuracy", "accuracy_low", "accuracy_high", "score", "score_low", "score_high", "loss", "penalty", "penalty_low",
    "penalty_high", "accuracy_penalty", "score_penalty", "perplexity", "bits_per_byte", "agreement",
)  # fmt: skip
# What stands beside the maps and needs no site, by what is asked: ceilings, then floors.
OF_LABELS = ("native_x", "native_y", "random_classifier", "random_label", "constant_label")
OF_TOKENS = ("native_x", "native_y", "unigram")
BITS = math.log(2)


class Answered(NamedTuple):
    """The answers to the U units of a batch, without the logits: those of a language model would fill the memory.

    Attributes:
        loss: (U,) in nats, or the squared error of a number.
        correct: (U,) 1 where the answer is the right one; NaN of numbers.
        answer: (U,) the class or token.
        said: (U,) the same or the number, NaN where logits are not finite.
    """

    loss: Tensor
    correct: Tensor
    answer: Tensor
    said: Tensor

    @classmethod
    def of(cls, logits: Tensor, batch: TaskBatch, *, regression: bool) -> Answered:
        """From chosen logits (U, C)."""
        scores, said = unit_scores(logits, batch.targets), unit_answers(logits, regression=regression)
        return cls(scores["loss"], scores["correct"], logits.argmax(-1), said)


class Behaviour:
    """Runs Y's tail on mapped states, and scores what needs no site beside it.

    Args:
        route: from X into Y.
        asked: of the held-out texts.
        whole: which methods need no site, out of `OF_LABELS` or `OF_TOKENS`.
        seed: of the random floors.
        token_counts: (V,) how often each token is in the fitting texts, for `unigram`.
    """

    def __init__(
        self, route: Route, asked: Asked, whole: Sequence[str], seed: int, token_counts: Tensor | None = None
    ) -> None:
        self.route, self.asked, self.whole, self.seed = route, asked, tuple(whole), seed
        self._random = None if asked.scored is None else asked.scored.random
        # one added to each, so that no token is impossible
        self._unigrams = None if token_counts is None else ((token_counts + 1) / (token_counts + 1).sum()).log()

    def injected(self, batch: TaskBatch, mapped: Tensor, own: Answered) -> dict[str, Tensor]:
        """What Y does with the mapped rows (S, N, d_y) at each site: quantity -> (S, B).

        Args:
            batch: what is asked.
            mapped: what is put into Y.
            own: what Y answers by itself.
        """
        regression = self.asked.regression
        each = [
            self._sums(Answered.of(logits, batch, regression=regression), batch, own)
            for logits in bank_logits(self.route, batch, mapped)
        ]
        return {name: torch.stack([found[name] for found in each]) for name in BEHAVIOUR}

    def without_sites(self, batch: TaskBatch, natives: dict[FrozenModel, Answered]) -> dict[str, Tensor]:
        """What is answered without any map: quantity -> (methods, 1, B).

        Args:
            batch: what is asked.
            natives: what each model that knows the task answers by itself.
        """
        own = natives[self.route.target]
        each = [self._sums(_ANSWERS[name](self, batch, natives), batch, own) for name in self.whole]
        return {name: torch.stack([found[name] for found in each])[:, None] for name in BEHAVIOUR}

    def _sums(self, found: Answered, batch: TaskBatch, own: Answered) -> dict[str, Tensor]:
        """Sums over the units of each text: quantity -> (B,); the answer to a text, NaN where many tokens are asked."""
        known = torch.where(found.said.isnan(), torch.nan, 1.0)
        agree = torch.full_like(known, torch.nan) if self.asked.regression else (found.answer == own.answer) * known
        units = {"correct": found.correct, "loss": found.loss, "agree": agree, "units": torch.ones_like(found.loss)}
        sums = {name: per_text(values, batch.targets) for name, values in units.items()}
        return {**sums, "answer": found.said if self.asked.unit == "text" else torch.full_like(sums["loss"], torch.nan)}

    def _of_target(self, batch: TaskBatch, natives: dict[FrozenModel, Answered]) -> Answered:
        return natives[self.route.target]

    def _of_source(self, batch: TaskBatch, natives: dict[FrozenModel, Answered]) -> Answered:
        """The source's own answers, if it knows the task."""
        own = natives[self.route.target]
        nothing = torch.full_like(own.loss, torch.nan)
        return natives.get(self.route.source, Answered(nothing, nothing, own.answer, nothing))

    def _fresh(self, batch: TaskBatch, natives: dict[FrozenModel, Answered]) -> Answered:
        target = self.route.target
        with target.fresh_head(self.seed):
            logits = chosen(target.logits(batch.inputs), batch.targets, one_after_another(target.class_map))
        return Answered.of(logits, batch, regression=self.asked.regression)

    def _random_label(self, batch: TaskBatch, natives: dict[FrozenModel, Answered]) -> Answered:
        self._random = cast(Tensor, self._random).to(batch.targets.answer)  # once: a copy to the device waits for it
        return self._unread(self._random[batch.texts.text], batch)

    def _constant_label(self, batch: TaskBatch, natives: dict[FrozenModel, Answered]) -> Answered:
        return self._unread(torch.full_like(batch.targets.answer, cast(ScoredTask, self.asked.scored).constant), batch)

    def _unread(self, answer: Tensor, batch: TaskBatch) -> Answered:
        """Of answers (B,) that are given without reading the texts; they have no loss, but that of a number."""
        labels = batch.targets.answer
        nothing = torch.full(labels.shape, torch.nan, device=labels.device)
        if self.asked.regression:
            return Answered((answer - labels).square(), nothing, answer, answer.double())
        return Answered(nothing, (answer == labels).float(), answer, answer.double())

    def _unigram(self, batch: TaskBatch, natives: dict[FrozenModel, Answered]) -> Answered:
        """The frequencies of tokens in the fitting texts."""
        right = batch.targets.answer
        self._unigrams = cast(Tensor, self._unigrams).to(right.device)  # once, likewise
        answer = self._unigrams.argmax().expand_as(right)
        return Answered(-self._unigrams[right], (answer == right).float(), answer, answer.double())


_ANSWERS: dict[str, Callable[[Behaviour, TaskBatch, dict[FrozenModel, Answered]], Answered]] = {
    "native": Behaviour._of_target,
    "native_y": Behaviour._of_target,
    "native_x": Behaviour._of_source,
    "random_classifier": Behaviour._fresh,
    "random_label": Behaviour._random_label,
    "constant_label": Behaviour._constant_label,
    "unigram": Behaviour._unigram,
}


def behaviour_columns(
    table: dict[str, Tensor], native: dict[str, Tensor], asked: Asked, seed: int
) -> dict[str, Tensor]:
    """Each of `BEHAVIOUR_COLUMNS` as (methods, S), over all texts.

    Where numbers are predicted there is no accuracy, no penalty in nats, and agreement is Pearson's correlation with
    Y's own answers.

    Args:
        table: quantity -> (methods, S, texts).
        native: quantity -> (texts,), of Y by itself.
        asked: of the texts.
        seed: of the resampling of texts.
    """
    units = native["units"]
    total = units.sum()

    def interval(values: Tensor) -> tuple[Tensor, Tensor]:
        return bootstrap_interval(values, units.expand_as(values), seed=seed)

    loss, accuracy = table["loss"].sum(-1) / total, table["correct"].sum(-1) / total
    missing = torch.full_like(loss, torch.nan)
    own = native["correct"].sum(-1) / total
    gap = table["loss"] - native["loss"]
    accuracies = accuracy, *interval(table["correct"])
    penalties = (missing,) * 3 if asked.regression else (gap.sum(-1) / total, *interval(gap))
    score, own_score = _score(table, asked, seed, accuracies), own
    if asked.scored is not None and asked.score != "accuracy":
        own_score = task_score(asked.scored.score, native["answer"], asked.scored.labels)
    agreement = table["agree"].sum(-1) / total
    if asked.regression:
        agreement = task_score("pearson", table["answer"], native["answer"])
    perplexity = loss.exp() if asked.unit == "token" else missing
    per_byte = loss / BITS / asked.bytes_per_token if asked.bytes_per_token else missing
    losses = loss, *penalties, own - accuracy, own_score - score[0], perplexity, per_byte
    return dict(zip(BEHAVIOUR_COLUMNS, (*accuracies, *score, *losses, agreement), strict=True))


def _score(
    table: dict[str, Tensor], asked: Asked, seed: int, accuracies: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The score of the task and its interval."""
    task = asked.scored
    if task is None or task.score == "accuracy":
        return accuracies
    interval = score_interval(task.score, table["answer"], task.labels, seed=seed)
    return task_score(task.score, table["answer"], task.labels), *interval
