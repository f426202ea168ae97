"""What Y does with states that are put into it, text by text, and the columns that a report makes of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aligners.injection.methods import WHOLE, Route
from aligners.scoring.answers import in_data_order, one_after_another
from aligners.scoring.scores import bootstrap_interval
from aligners.scoring.task_scores import ScoredTask, score_interval, task_score
from aligners.scoring.tasks import unit_answers, unit_scores
from datamodules.reading import PairedBatch
from datamodules.targets import classification_targets
from frozen.architectures import Component
from frozen.model import FrozenModel

__all__ = ["BEHAVIOUR", "BEHAVIOUR_COLUMNS", "Behaviour", "behaviour_columns"]

BEHAVIOUR = ["correct", "loss", "agree", "answer"]
BEHAVIOUR_COLUMNS = (
    "accuracy", "accuracy_low", "accuracy_high", "score", "score_low", "score_high", "loss", "agreement",
)  # fmt: skip


class Behaviour:
    """Runs Y's tail on mapped states, and scores what needs no site beside it.

    Args:
        route: from X into Y.
        sites: of each pair, the one in Y.
        component: what is replaced there.
        task: what the held-out texts ask.
        seed: of the random floors.
    """

    def __init__(self, route: Route, sites: list[int], component: Component, task: ScoredTask, seed: int) -> None:
        self.source, self.target = route.source, route.target
        self.sites, self.component, self.task, self.seed = sites, component, task, seed
        self._random = task.random

    def injected(self, batch: PairedBatch, mapped: Tensor, native: Tensor) -> dict[str, Tensor]:
        """What Y does with the mapped rows (S, N, d_y) at each site: quantity -> (S, B).

        Args:
            batch: whose rows are all tokens.
            mapped: what is put into Y.
            native: (B, C) what Y says by itself, in the order of the texts' classes.
        """
        inputs = batch.texts.inputs_x
        blank = mapped.new_zeros(*inputs["input_ids"].shape, self.target.width)
        logits = [
            self.target.tail(inputs, site, batch.rows.scatter(rows, blank), self.component)
            for site, rows in zip(self.sites, mapped, strict=True)
        ]
        return self._scores(in_data_order(torch.stack(logits), self.target.class_map), batch, native)

    def _scores(self, logits: Tensor, batch: PairedBatch, native: Tensor) -> dict[str, Tensor]:
        """Each quantity of logits (..., B, C) in the order of the texts' classes: (..., B)."""
        found = unit_scores(logits, classification_targets(self._labels(batch)), native.argmax(-1))
        return {**found, "answer": unit_answers(logits, regression=self.task.regression)}

    def _labels(self, batch: PairedBatch) -> Tensor:
        labels: Any = batch.texts.labels  # there, or nothing is injected
        return labels.float() if self.task.regression else labels

    def whole(self, batch: PairedBatch, natives: dict[FrozenModel, Tensor]) -> dict[str, Tensor]:
        """The rows of `WHOLE`: quantity -> (methods, 1, B).

        Args:
            batch: of texts with labels.
            natives: (B, C) likewise of each model with a head for the task.
        """
        inputs, labels = batch.texts.inputs_x, self._labels(batch)
        native = natives[self.target]
        missing = torch.full_like(native, torch.nan)
        # The source answers its own way; without a head, or one of this task, there is nothing to say.
        of_source = natives.get(self.source, missing)
        with self.target.fresh_head(self.seed):
            fresh = in_data_order(self.target.logits(inputs), one_after_another(self.target.class_map))
        found = self._scores(torch.stack([of_source, native, fresh, missing, missing]), batch, native)
        self._random = self._random.to(labels)  # once: a copy to the device waits for it
        for name, given in (("random_label", self._random), ("constant_label", None)):
            place = WHOLE.index(name)
            answer = torch.full_like(labels, self.task.constant) if given is None else given[batch.texts.text]
            found["answer"][place] = answer
            if self.task.regression:
                found["loss"][place] = (answer - labels).square()
            else:
                found["correct"][place], found["agree"][place] = answer == labels, answer == native.argmax(-1)
        return {name: values[:, None] for name, values in found.items()}


def behaviour_columns(table: dict[str, Tensor], native: Tensor, task: ScoredTask, seed: int) -> dict[str, Tensor]:
    """Each of `BEHAVIOUR_COLUMNS` as (methods, S), over all texts.

    Where numbers are predicted there is no accuracy, and agreement is Pearson's correlation with Y's own answers.

    Args:
        table: quantity -> (methods, S, texts).
        native: (texts,) what Y answers by itself.
        task: what is asked.
        seed: of the resampling of texts.
    """
    accuracy = table["correct"].mean(-1), *bootstrap_interval(table["correct"], seed=seed)
    agreement = task_score("pearson", table["answer"], native) if task.regression else table["agree"].mean(-1)
    score = accuracy
    if task.score != "accuracy":
        interval = score_interval(task.score, table["answer"], task.labels, seed=seed)
        score = task_score(task.score, table["answer"], task.labels), *interval
    figures = (*accuracy, *score, table["loss"].mean(-1), agreement)
    return dict(zip(BEHAVIOUR_COLUMNS, figures, strict=True))
