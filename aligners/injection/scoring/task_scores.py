"""The score of a task, from the answer to each text: accuracy, Matthews' correlation, F1, Pearson's and Spearman's."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self, cast

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torchmetrics.functional import pearson_corrcoef, spearman_corrcoef
from torchmetrics.functional.classification import binary_f1_score

from aligners.errors import UserError
from aligners.injection.scoring.scores import Figures, resampled, with_interval
from aligners.maps.baselines import random_labels
from aligners.models.architectures import Task
from aligners.models.model import FrozenModel
from datamodules.module import TextModule
from datamodules.text.sources import Score, TextSource, known_source

OF_CLASSES: tuple[Score, ...] = ("accuracy", "mcc", "f1")
OF_NUMBERS: tuple[Score, ...] = ("pearson", "spearman")
FAR_BELOW = 0.1  # of another order of the classes, as a share of the texts
CELLS = 2**17  # answers resampled at a time: as many as fit in a processor's cache


def choose_score(text: TextSource, *, regression: bool, classes: int) -> Score:
    """Choose the score of a task: `score` if given; that of GLUE (`SOURCES`); else accuracy, or Pearson's correlation.

    Args:
        text: the texts of the task.
        regression: whether numbers are predicted.
        classes: the number of classes otherwise.

    Raises:
        ValueError: `score` does not fit the task.
    """
    usual: Score = "pearson" if regression else "accuracy"
    score = text.score or known_source(text).score or usual
    known = OF_NUMBERS if regression else OF_CLASSES if classes == 2 else ("accuracy",)
    if score not in known:
        what = "numbers to predict" if regression else f"{classes} classes"
        raise UserError(f"Expected `score` out of {', '.join(known)} for texts with {what}, but got {score!r}.")
    return score


def task_score(score: Score, answers: Tensor, labels: Tensor) -> Tensor:
    """Score each row of answers; NaN if one of its answers is NaN.

    An answer that is the same for every text has no correlation: Pearson, Spearman and Matthews give 0. F1 is that of
    class 1.

    Args:
        score: the score.
        answers: (..., n) classes or numbers.
        labels: (n,) likewise.
    """
    rows = answers.double().reshape(-1, answers.shape[-1])
    scores = _FUNCTIONS[score](rows.nan_to_num().T, labels.double()[:, None].expand(-1, len(rows)))
    return scores.where(rows.isfinite().all(-1), torch.nan).reshape(answers.shape[:-1])


def score_interval(score: Score, answers: Tensor, labels: Tensor, *, seed: int) -> Figures:
    """A score with the ends of its 95 % percentile interval over resampled texts, each (...).

    The arguments are those of `resampled_scores`.
    """
    return with_interval(resampled_scores(score, answers, labels, seed=seed))


def resampled_scores(score: Score, answers: Tensor, labels: Tensor, *, seed: int) -> Tensor:
    """Score the texts and resamples of them, those of `scores.resampled`: (..., 1 + R); NaN if an answer is NaN.

    Args:
        score: the score.
        answers: (..., n) classes or numbers.
        labels: (n,) likewise.
        seed: the seed of the resampling.
    """
    drawn = resampled(answers.shape[-1], seed)
    rows = answers.double().reshape(-1, answers.shape[-1])
    parts = drawn.split(max(1, CELLS // answers.shape[-1]))
    scores = [
        torch.cat([_FUNCTIONS[score](row[part].T, labels.double()[part].T) for part in parts])
        if bool(row.isfinite().all())
        else torch.full((len(drawn),), torch.nan, dtype=torch.float64)
        for row in rows
    ]
    return torch.stack(scores).reshape(*answers.shape[:-1], len(drawn))


def wrong_order(model: str, answers: Tensor, labels: Tensor) -> str | None:
    """A caution if a classifier would be right far more often with its classes in another order; None if not.

    Far is more than .1 of the texts and more than two standard errors, which are at most 1/√n. A score far below chance
    is among these cases: over all orders of C classes the mean accuracy is 1/C. Texts of one class, as of a part of
    HANS, tell nothing of an order.

    Args:
        model: its name.
        answers: (n,) classes; NaN: no answer, and nothing is said.
        labels: (n,) the right classes.
    """
    if not bool(answers.isfinite().all()) or len(labels.unique()) == 1:
        return None
    right, given = labels.long(), answers.long()
    classes = 1 + int(torch.stack([right, given]).amax())
    counts = (classes * given + right).bincount(minlength=classes**2).view(classes, classes)
    rows, columns = linear_sum_assignment(counts.cpu(), maximize=True)
    accuracy, best = (int(part.sum()) / len(right) for part in (counts.diag(), counts[rows, columns]))
    if best - accuracy <= max(FAR_BELOW, 2 / len(right) ** 0.5):
        return None
    order = ", ".join(f"{k} as {int(place)}" for k, place in zip(rows, columns, strict=True) if k != place)
    return (
        f"Caution: {model} by itself has an accuracy of {accuracy:.1%} on the held-out texts, and would have "
        f"{best:.1%} with its classes in another order ({order}). They probably do not stand in that of the texts': "
        "say which are which by `--data.labels`."
    )


def _f1(answers: Tensor, labels: Tensor) -> Tensor:
    whole = answers.T.long(), labels.T.long()
    return binary_f1_score(*whole, multidim_average="samplewise", validate_args=False).double()


def _correlation(function: Callable[[Tensor, Tensor], Tensor], answers: Tensor, labels: Tensor) -> Tensor:
    """Correlate the columns of (n, R) and (n, R); 0 if one is constant, where torchmetrics gives NaN and a warning."""
    spread = torch.stack([values.amax(0) - values.amin(0) for values in (answers, labels)])
    constant = (spread == 0).any(0)
    ramp = torch.arange(len(answers), dtype=torch.float64)[:, None].expand_as(answers)
    # Correlations do not depend on the unit, but torchmetrics warns about numbers that are close to each other.
    sides = zip((answers, labels), spread, strict=True)
    scaled = [torch.where(constant, ramp, (values - values.amin(0)) / scale) for values, scale in sides]
    return function(*scaled).reshape(-1).double().where(~constant, 0.0)


_FUNCTIONS: dict[Score, Callable[[Tensor, Tensor], Tensor]] = {
    "accuracy": lambda answers, labels: (answers == labels).double().mean(0),
    "mcc": partial(_correlation, pearson_corrcoef),  # for classes 0 and 1 this is Matthews' correlation
    "f1": _f1,
    "pearson": partial(_correlation, pearson_corrcoef),
    "spearman": partial(_correlation, spearman_corrcoef),
}


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
    def of(cls, data: TextModule, model: FrozenModel, *, seed: int) -> Self:
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
