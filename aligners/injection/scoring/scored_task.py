"""What the held-out texts ask of a model, and what is answered without reading them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from aligners.injection.scoring.task_scores import choose_score, task_score
from aligners.maps.baselines import random_labels
from aligners.models.architectures import Task
from aligners.models.model import FrozenModel
from datamodules.text.sources import Score

if TYPE_CHECKING:
    from datamodules.module import TextModule


@dataclass(frozen=True)
class ScoredTask:
    """The task of the models that answer.

    Attributes:
        task: classes (or numbers), masked tokens, or next tokens.
        bytes_per_token: of the held-out texts, for next tokens.
        score: the task's score.
        regression: whether numbers are predicted.
        labels: (n,) labels of the held-out texts; None where tokens are asked for.
        random: (n,) a class for each, uniformly at random; for numbers, the labels themselves in a random order.
        constant: the most frequent class of the fitting texts, or the mean of their numbers.
    """

    task: Task
    bytes_per_token: float | None = None
    score: Score = "accuracy"
    regression: bool = False
    labels: Tensor | None = None
    random: Tensor | None = None
    constant: float = 0.0

    @classmethod
    def of(cls, data: TextModule, model: FrozenModel, *, seed: int) -> ScoredTask:
        """What a data module's held-out texts ask of a model and of others with the same task.

        Raises:
            ValueError: the score that is asked for does not fit the task, or all numbers to predict are equal.
        """
        if model.task != "classification":
            causal = model.task == "causal"
            return cls("causal", data.bytes_per_token("test")) if causal else cls("masked")
        regression, texts = model.regression, data.texts
        if regression:
            texts.check_numbers()
        labels = cast(Tensor, data.split("test").labels)
        classes = 0 if regression else texts.classes
        score = choose_score(data.text, regression=regression, classes=classes)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        labels = labels.float() if regression else labels
        random = labels[order] if regression else random_labels(len(labels), classes, seed)
        constant = texts.constant_label(regression=regression)
        return cls("classification", None, score, regression, labels, random, constant)

    @property
    def unit(self) -> str:
        """The unit of an answer: a text or a token."""
        return "text" if self.task == "classification" else "token"

    def constant_score(self) -> float | None:
        """Score the answer that is the same for every text; None where tokens are asked for."""
        if self.labels is None:
            return None
        return float(task_score(self.score, torch.full(self.labels.shape, self.constant), self.labels))
