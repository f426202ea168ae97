"""What the held-out texts ask of a model, and what is needed to score its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aligners.injection.scoring.task_scores import ScoredTask
from aligners.models.architectures import Task
from aligners.models.model import FrozenModel

if TYPE_CHECKING:
    from datamodules.module import TextModule

__all__ = ["Asked"]


@dataclass(frozen=True)
class Asked:
    """The task of the models that answer.

    Attributes:
        task: classes (or numbers), masked tokens, or next tokens.
        scored: labels and score of a classification or regression; None where tokens are asked for.
        bytes_per_token: of the held-out texts, for next tokens.
    """

    task: Task
    scored: ScoredTask | None = None
    bytes_per_token: float | None = None

    @classmethod
    def of(cls, data: TextModule, model: FrozenModel, *, seed: int) -> Asked:
        """What a data module's held-out texts ask of a model and of others with the same task.

        Raises:
            ValueError: the score that is asked for does not fit the task.
        """
        if model.task == "classification":
            return cls("classification", ScoredTask.of(data, regression=model.regression, seed=seed))
        per_token = data.bytes_per_token("test") if model.task == "causal" else None
        return cls("causal" if model.task == "causal" else "masked", None, per_token)

    @property
    def unit(self) -> str:
        """The unit of an answer: a text or a token."""
        return "text" if self.task == "classification" else "token"

    @property
    def regression(self) -> bool:
        """Whether a number is predicted."""
        return self.scored is not None and self.scored.regression

    @property
    def score(self) -> str:
        """The score of the task."""
        return "accuracy" if self.scored is None else self.scored.score
