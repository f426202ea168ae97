"""What Y does with states that are put into it, text by text, and the columns that a report makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from aligners.injection.forward import bank_logits
from aligners.injection.routes import Route
from aligners.scoring.answers import one_after_another
from aligners.scoring.asked import Asked
from aligners.scoring.scores import bootstrap_interval
from aligners.scoring.task_scores import ScoredTask, score_interval, task_score
from aligners.scoring.tasks import chosen, per_text, unit_answers, unit_scores
from datamodules.asking import TaskBatch
from frozen.model import FrozenModel

__all__ = ["BEHAVIOUR", "BEHAVIOUR_COLUMNS", "OF_LABELS", "OF_TOKENS", "Behaviour", "behaviour_columns"]

BEHAVIOUR = ["correct", "loss", "agree", "answer", "units"]
BEHAVIOUR_COLUMNS = (
    "accuracy", "accuracy_low", "accuracy_high", "score", "score_low", "score_high", "loss", "penalty", "penalty_low",
    "penalty_high", "accuracy_penalty", "score_penalty", "perplexity", "bits_per_byte", "agreement",
)  # fmt: skip
# What stands beside the maps and needs no site, by what is asked: ceilings, then floors.
OF_LABELS = ("native_x", "native_y", "random_classifier", "random_label", "constant_label")
OF_TOKENS = ("native_x", "native_y", "unigram")
BITS = math.log(2)


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
        self._counts, self._random = token_counts, None if asked.scored is None else asked.scored.random

    def injected(self, batch: TaskBatch, mapped: Tensor, own: Tensor) -> dict[str, Tensor]:
        """What Y does with the mapped rows (S, N, d_y) at each site: quantity -> (S, B).

        Args:
            batch: what is asked.
            mapped: what is put into Y.
            own: (U,) what Y answers by itself.
        """
        each = [self._scores(logits, batch, own) for logits in bank_logits(self.route, batch, mapped)]
        return {name: torch.stack([found[name] for found in each]) for name in BEHAVIOUR}

    def without_sites(self, batch: TaskBatch, natives: dict[FrozenModel, Tensor]) -> dict[str, Tensor]:
        """What is answered without any map: quantity -> (methods, 1, B).

        Args:
            batch: what is asked.
            natives: (U, C) what each model that knows the task says by itself.
        """
        own = natives[self.route.target]
        each = [self._of(name, batch, natives, own) for name in self.whole]
        return {name: torch.stack([found[name] for found in each])[:, None] for name in BEHAVIOUR}

    def _scores(self, logits: Tensor, batch: TaskBatch, own: Tensor) -> dict[str, Tensor]:
        """Sums over the units of each text, of logits (U, C): quantity -> (B,)."""
        units = {**unit_scores(logits, batch.targets, own), "units": torch.ones_like(own, dtype=torch.float32)}
        found = {name: per_text(values, batch.targets) for name, values in units.items()}
        if self.asked.unit == "text":
            return {**found, "answer": unit_answers(logits, regression=self.asked.regression)}
        return {**found, "answer": torch.full_like(found["loss"], torch.nan)}

    def _of(self, name: str, batch: TaskBatch, natives: dict[FrozenModel, Tensor], own: Tensor) -> dict[str, Tensor]:
        if name in ("random_label", "constant_label"):
            return self._labelled(name, batch, own)
        return self._scores(_LOGITS[name](self, batch, natives, own), batch, own.argmax(-1))

    def _labelled(self, name: str, batch: TaskBatch, own: Tensor) -> dict[str, Tensor]:
        """Of answers that are given without reading the texts; they have no loss, but that of a number."""
        task, labels = cast(ScoredTask, self.asked.scored), batch.targets.answer
        self._random = cast(Tensor, self._random).to(labels)  # once: a copy to the device waits for it
        answer = torch.full_like(labels, task.constant) if name == "constant_label" else self._random[batch.texts.text]
        found = self._scores(torch.full_like(own, torch.nan), batch, own.argmax(-1))
        found["answer"] = answer.to(found["answer"])
        if task.regression:
            return {**found, "loss": (answer - labels).square()}
        return {**found, "correct": (answer == labels).float(), "agree": (answer == own.argmax(-1)).float()}

    def _of_source(self, batch: TaskBatch, natives: dict[FrozenModel, Tensor], own: Tensor) -> Tensor:
        """The source answers its own way; where it does not know the task there is nothing to say."""
        return natives.get(self.route.source, torch.full_like(own, torch.nan))

    def _fresh(self, batch: TaskBatch, natives: dict[FrozenModel, Tensor], own: Tensor) -> Tensor:
        target = self.route.target
        with target.fresh_head(self.seed):
            return chosen(target.logits(batch.inputs), batch.targets, one_after_another(target.class_map))

    def _unigram(self, batch: TaskBatch, natives: dict[FrozenModel, Tensor], own: Tensor) -> Tensor:
        """The frequencies of tokens in the fitting texts, one added to each."""
        counts = torch.ones(own.shape[-1], device=own.device)
        known = cast(Tensor, self._counts).to(counts)
        counts[: len(known)] += known
        return counts.log().expand_as(own)


_LOGITS: dict[str, Callable[[Behaviour, TaskBatch, dict[FrozenModel, Tensor], Tensor], Tensor]] = {
    "native": lambda behaviour, batch, natives, own: own,
    "native_y": lambda behaviour, batch, natives, own: own,
    "native_x": Behaviour._of_source,
    "random_classifier": Behaviour._fresh,
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
