"""Scores kept text by text, with intervals over resampled texts, and the choice of a task's score."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional import pearson_corrcoef, spearman_corrcoef
from torchmetrics.functional.classification import (
    binary_f1_score,
    multiclass_confusion_matrix,
)

from aligners.datamodules.module import TextModule
from aligners.datamodules.rows.policies import Rows
from aligners.datamodules.task_targets import Targets
from aligners.datamodules.text.sources import Score, TextSource, known_source
from aligners.errors import UserError, finite
from aligners.maps.baselines import random_labels
from aligners.models.architectures import Task
from aligners.models.model import FrozenModel
from aligners.similarity.double_metric import DoubleMetric

RESAMPLES = 1000
LEVEL = 0.95
Sums = dict[str, Tensor]  # quantity -> its sum over each text
Row = dict[str, Any]  # of a report
Figures = tuple[Tensor, Tensor, Tensor]  # a figure and the two ends of its interval

OF_CLASSES: tuple[Score, ...] = ("accuracy", "mcc", "f1")
OF_NUMBERS: tuple[Score, ...] = ("pearson", "spearman")
FAR_BELOW = (
    0.1  # how much better another order of classes must be, as a share of the texts
)
CELLS = 2**17  # answers resampled at a time: as many as fit in a processor's cache


class TextScores(Metric):
    """A table of sums (quantities, methods, sites, texts).

    Each text is written by the one rank that saw it, so adding the tables of all ranks is exact.

    Args:
        quantities: the names of what is scored.
        methods: number of methods.
        sites: number of site pairs.
        texts: number of held-out texts.
    """

    full_state_update = False
    table: Tensor
    seen: Tensor

    def __init__(
        self, quantities: list[str], methods: int, sites: int, texts: int, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.quantities = quantities
        shape = (len(quantities), methods, sites, texts)
        table = torch.zeros(shape).double()
        self.add_state("table", table, dist_reduce_fx="sum")
        seen = torch.zeros(texts, dtype=torch.long)
        self.add_state("seen", seen, dist_reduce_fx="sum")

    def update(self, text: Tensor, scores: Sums) -> None:
        """Write the scores of a batch.

        Args:
            text: (B,) numbers of the texts.
            scores: quantity -> (methods, sites, B).
        """
        self.seen[text] += 1
        for place, quantity in enumerate(self.quantities):
            table = self.table[place]
            table[:, :, text] = scores[quantity].double()

    def compute(self) -> Sums:
        """Return quantity -> (methods, sites, texts), on the CPU.

        Raises:
            RuntimeError: a text was counted twice or not at all.
        """
        twice = (self.seen > 1).sum()
        never = (self.seen == 0).sum()
        if twice or never:
            raise RuntimeError(
                f"Every held-out text must count once, but {twice} counted twice and {never} never."
            )
        tables = self.table.cpu()
        return dict(zip(self.quantities, tables, strict=True))


class UnitMeans(DoubleMetric):
    """Means over all units (texts, or predicted tokens) of several quantities, exact over batches and ranks.

    Args:
        quantities: S, their number.
    """

    sums: Tensor
    units: Tensor

    def __init__(self, quantities: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        sums = torch.zeros(quantities).double()
        self.add_state("sums", sums, dist_reduce_fx="sum")
        units = torch.zeros(()).double()
        self.add_state("units", units, dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        """Add the units of a batch, (S, U)."""
        self.sums += values.double().sum(-1)
        self.units += values.shape[-1]

    def compute(self) -> Tensor:
        """Return the means, (S,), also for S = 1."""
        return self.sums / self.units


def resampled(n: int, seed: int) -> Tensor:
    """Return the numbers of n texts, followed by `RESAMPLES` (R) draws of n texts with replacement: (1 + R, n).

    Equal seeds draw equal texts.
    """
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.randint(n, (RESAMPLES, n), generator=draw)
    every = torch.arange(n)
    return torch.vstack([every, drawn])


def resampled_counts(n: int, seed: int) -> Tensor:
    """Count how often each of n texts occurs: once, then as drawn in each resample, (1 + R, n) float64."""
    drawn = resampled(n, seed)
    counts = torch.zeros(drawn.shape).double()
    ones = torch.ones_like(counts)
    return counts.scatter_add_(1, drawn, ones)


def with_interval(values: Tensor) -> Figures:
    """Return a figure and the ends of its 95 % percentile interval, each (...).

    Args:
        values: (..., 1 + R), the figure and its resamples.
    """
    tail = (1 - LEVEL) / 2
    ends = values.new_tensor([tail, 1 - tail])
    figure = values[..., 0]
    resamples = values[..., 1:]
    low, high = resamples.nanquantile(ends, dim=-1)
    return figure, low, high


def named(name: str, figures: Iterable[Any]) -> dict[str, Any]:
    """Name a figure and the ends of its interval as columns of a report: `name`, `name_low` and `name_high`."""
    figure, low, high = figures
    return {name: figure, f"{name}_low": low, f"{name}_high": high}


def per_text_sums(values: Tensor, rows: Rows | Targets) -> Tensor:
    """Sum over the rows or units of each text of a batch: (..., N) -> (..., B); zero for a text without any."""
    lead = values.shape[:-1]
    sums = values.new_zeros(*lead, rows.texts)
    return sums.index_add_(-1, rows.owner, values)


def of_unseen(values: Tensor, rows: Rows) -> Tensor:
    """Set values of rows (..., N) to zero unless their types are unseen; all NaN where types are not known."""
    if rows.unseen is None:
        return torch.full_like(values, torch.nan)
    return values.where(rows.unseen, 0)


def interval(values: Tensor, weights: Tensor | None = None, *, seed: int) -> Figures:
    """Return a mean over texts, or a ratio of sums, with its 95 % percentile interval over resampled texts.

    Args:
        values: (..., n) one number for each text.
        weights: (..., n) denominators; default: 1 for each text.
        seed: the seed of the resampling; equal seeds draw equal texts, so intervals of methods can be compared.

    Returns:
        The mean, and the lower and upper end, each (...); the ends are NaN where values are not finite. Resamples with
        a zero denominator do not count.
    """
    counts = resampled_counts(values.shape[-1], seed)
    denominator = counts.sum(1)
    if weights is not None:
        denominator = weights.double() @ counts.T
    means = values.double() @ counts.T / denominator
    mean, low, high = with_interval(means)
    known = values.isfinite().all(-1)
    low = low.where(known, torch.nan)
    high = high.where(known, torch.nan)
    return mean, low, high


def resampled_columns(figures: Mapping[str, Tensor]) -> Row:
    """Turn figures with their resamples, each (1 + R,), into columns of a report; see `named`."""
    row: Row = {}
    for name, values in figures.items():
        found = with_interval(values)
        row |= named(name, map(finite, found))
    return row


def mean_columns(name: str, values: Tensor, weights: Tensor, seed: int) -> Row:
    """Turn a ratio of sums over texts, each (n,), into columns of a report, with its interval; see `named`."""
    values = values.double().cpu()
    weights = weights.double().cpu()
    figures = interval(values, weights, seed=seed)
    return named(name, map(finite, figures))


# ---------------------------------------------------------------------- the score of a task


def choose_score(text: TextSource, *, regression: bool, classes: int) -> Score:
    """Choose the score of a task: `score` if given; that of GLUE (`SOURCES`); else accuracy, or Pearson's correlation.

    Args:
        text: the texts of the task.
        regression: whether numbers are predicted.
        classes: the number of classes otherwise.

    Raises:
        ValueError: `score` does not fit the task.
    """
    what, known = f"{classes} classes", OF_CLASSES
    if regression:
        what, known = "numbers to predict", OF_NUMBERS
    elif classes != 2:
        known = ("accuracy",)
    usual = known_source(text).score or known[0]
    score = text.score or usual
    if score not in known:
        raise UserError(
            f"Expected `score` out of {', '.join(known)} for texts with {what}, but got {score!r}."
        )
    return score


def task_score(score: Score, answers: Tensor, labels: Tensor) -> Tensor:
    """Score each row of answers; NaN if one of its answers is NaN.

    If all answers are equal there is no correlation, and Pearson, Spearman and Matthews give 0. F1 is that of
    class 1.

    Args:
        score: the score.
        answers: (..., n) classes or numbers.
        labels: (n,) likewise.
    """
    *lead, texts = answers.shape
    rows = answers.double().reshape(-1, texts)
    columns = rows.nan_to_num().T
    right = labels.double()[:, None]
    scores = _column_scores(score, columns, right.expand_as(columns))
    known = rows.isfinite().all(-1)
    return scores.where(known, torch.nan).reshape(lead)


def score_interval(
    score: Score, answers: Tensor, labels: Tensor, *, seed: int
) -> Figures:
    """Return a score with its 95 % percentile interval over resampled texts, each (...); see `resampled_scores`."""
    scores = resampled_scores(score, answers, labels, seed=seed)
    return with_interval(scores)


def resampled_scores(
    score: Score, answers: Tensor, labels: Tensor, *, seed: int
) -> Tensor:
    """Score the texts and each resample of them, see `resampled`: (..., 1 + R); NaN if an answer is NaN.

    Args:
        score: the score.
        answers: (..., n) classes or numbers.
        labels: (n,) likewise.
        seed: the seed of the resampling.
    """
    *lead, texts = answers.shape
    right = labels.double()
    drawn = resampled(texts, seed)
    parts = drawn.split(max(1, CELLS // texts))
    scores = []
    for row in answers.double().reshape(-1, texts):
        if not row.isfinite().all():
            scores.append(row.new_full([len(drawn)], torch.nan))
            continue
        found = []
        for part in parts:
            given = row[part].T
            found.append(_column_scores(score, given, right[part].T))
        scores.append(torch.cat(found))
    return torch.stack(scores).reshape(*lead, len(drawn))


def _column_scores(score: Score, answers: Tensor, labels: Tensor) -> Tensor:
    """Score each column of (n, R) answers against the same column of (n, R) labels: (R,) float64."""
    if score == "accuracy":
        correct = answers == labels
        return correct.double().mean(0)
    if score == "f1":
        found = binary_f1_score(
            answers.T.long(),
            labels.T.long(),
            multidim_average="samplewise",
            validate_args=False,
        )
        return found.double()

    scaled_answers, same_answer = _scaled(answers)
    scaled_labels, same_label = _scaled(labels)
    if score == "spearman":
        found = spearman_corrcoef(scaled_answers, scaled_labels)
    else:  # for classes 0 and 1, this is Matthews' correlation
        found = pearson_corrcoef(scaled_answers, scaled_labels)
    varied = ~(same_answer | same_label)
    return found.reshape(-1).double().where(varied, 0.0)


def _scaled(values: Tensor) -> tuple[Tensor, Tensor]:
    """Scale columns (n, R) to 0..1, which changes no correlation, and tell which columns are constant, (R,).

    torchmetrics warns if values are nearly equal, so constant columns become 0..n-1.
    """
    least = values.amin(0)
    spread = values.amax(0) - least
    constant = spread == 0
    ramp = torch.arange(len(values)).to(values)
    scaled = (values - least) / spread
    return scaled.where(~constant, ramp[:, None]), constant


def wrong_order(model: str, answers: Tensor, labels: Tensor) -> str | None:
    """Return a caution if a classifier would be right far more often with its classes in another order, else None.

    Far more often means more than .1 of the texts and more than two standard errors, which are at most 1/√n. Accuracy
    far below chance is such a case, as the mean accuracy over all orders of C classes is 1/C. Texts of only one class,
    such as a part of HANS, tell nothing about the order.

    Args:
        model: name of the model.
        answers: (n,) classes; NaN: no answer, and there is no caution.
        labels: (n,) the right classes.
    """
    from scipy.optimize import linear_sum_assignment

    known = answers.isfinite()
    if not known.all() or len(labels.unique()) == 1:
        return None
    answers, labels = answers.long(), labels.long()
    classes = 1 + int(torch.maximum(answers, labels).max())
    counts = multiclass_confusion_matrix(answers, labels, classes).cpu()
    given, meant = linear_sum_assignment(counts.T, maximize=True)
    accuracy = int(counts.trace()) / len(labels)
    right = counts[meant, given]
    best = int(right.sum()) / len(labels)
    two_errors = 2 / len(labels) ** 0.5
    if best - accuracy <= max(FAR_BELOW, two_errors):
        return None

    moved = _moved(given, meant)
    return (
        f"Caution: {model} by itself has an accuracy of {accuracy:.1%} on the held-out texts, and would have "
        f"{best:.1%} with its classes in another order ({', '.join(moved)}). They are probably not in the order of the "
        "texts' classes: say which are which by `--data.labels`."
    )


def _moved(given: Iterable[int], meant: Iterable[int]) -> list[str]:
    """Say which class of a head stands for which other class of the texts."""
    moved = []
    for k, place in zip(given, meant, strict=True):
        if k != place:
            moved.append(f"{k} as {place}")
    return moved


def _shuffled(labels: Tensor, seed: int) -> Tensor:
    """Return labels (n,) in a random order."""
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=draw)
    return labels[order]


@dataclass(frozen=True)
class ScoredTask:
    """The task shared by the scored models.

    Attributes:
        task: classes (or numbers), masked tokens, or next tokens.
        bytes_per_token: bytes per token of the held-out texts, for next tokens.
        score: the task's score.
        regression: whether numbers are predicted.
        labels: (n,) labels of the held-out texts; None where tokens are predicted.
        random: (n,) a class for each, uniformly at random; for numbers, the labels themselves in a random order.
        constant: the best answer that ignores the text: the most frequent class of the fitting texts, or the mean of
            their numbers.
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
        """Return the task of a data module's held-out texts, for a model and others of its kind.

        Raises:
            ValueError: the requested score does not fit the task, or all numbers to predict are equal.
        """
        if model.task == "causal":
            return cls("causal", data.bytes_per_token("test"))
        if model.task != "classification":
            return cls("masked")

        regression, texts = model.regression, data.texts
        labels = cast(Tensor, data.split("test").labels)
        if regression:
            texts.check_numbers()
            score = choose_score(data.text, regression=True, classes=0)
            labels = labels.float()
            random = _shuffled(labels, seed)
        else:
            classes = texts.classes
            score = choose_score(data.text, regression=False, classes=classes)
            random = random_labels(len(labels), classes, seed)
        return cls(
            "classification",
            score=score,
            regression=regression,
            labels=labels,
            random=random,
            constant=texts.constant_label(regression=regression),
        )

    @property
    def unit(self) -> str:
        """The unit that an answer is about: a text or a token."""
        if self.task == "classification":
            return "text"
        return "token"

    def constant_score(self) -> float | None:
        """Return the score of a constant answer; None where tokens are predicted."""
        if self.labels is None:
            return None
        answers = torch.full(self.labels.shape, self.constant)
        score = task_score(self.score, answers, self.labels)
        return float(score)
