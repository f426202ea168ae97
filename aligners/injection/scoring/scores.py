"""Scores kept text by text, so that any interval can be taken later, and the score of a task from the answers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional import pearson_corrcoef, spearman_corrcoef
from torchmetrics.functional.classification import binary_f1_score

from aligners.datamodules.module import TextModule
from aligners.datamodules.rows.policies import Rows
from aligners.datamodules.task_targets import Targets
from aligners.datamodules.text.sources import Score, TextSource, known_source
from aligners.errors import UserError, finite
from aligners.maps.baselines import random_labels
from aligners.models.architectures import Task
from aligners.models.model import FrozenModel
from aligners.similarity.algebra.moments import DoubleMetric

RESAMPLES = 1000
LEVEL = 0.95
Sums = dict[str, Tensor]  # quantity -> its sum over each text
Row = dict[str, Any]  # of a report
Figures = tuple[
    Tensor, Tensor, Tensor
]  # a figure, and the lower and the upper end of its interval


class TextScores(Metric):
    """A table of sums (quantities, methods, sites, texts), each text written by the one rank that saw it.

    Ranks fill disjoint columns, so adding their tables is exact for any number of ranks.

    Args:
        quantities: names of what is scored.
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
        self.add_state(
            "table", torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum"
        )
        self.add_state(
            "seen", torch.zeros(texts, dtype=torch.long), dist_reduce_fx="sum"
        )

    def update(self, text: Tensor, scores: Sums) -> None:
        """Write the scores of a batch.

        Args:
            text: (B,) numbers of the texts.
            scores: quantity -> (methods, sites, B).
        """
        self.seen[text] += 1
        for place, quantity in enumerate(self.quantities):
            self.table[place][:, :, text] = scores[quantity].double()

    def compute(self) -> Sums:
        """Quantity -> (methods, sites, texts), on the CPU.

        Raises:
            RuntimeError: a text was counted twice or not at all.
        """
        if not bool((self.seen == 1).all()):
            twice, never = int((self.seen > 1).sum()), int((self.seen == 0).sum())
            raise RuntimeError(
                f"Every held-out text must count once, but {twice} counted twice and {never} never."
            )
        return dict(zip(self.quantities, self.table.cpu(), strict=True))


class UnitMeans(DoubleMetric):
    """Means over all units (texts, or predicted tokens) of several quantities, exact over batches and ranks.

    Args:
        quantities: S, their number.
    """

    sums: Tensor
    units: Tensor

    def __init__(self, quantities: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state(
            "sums", torch.zeros(quantities, dtype=torch.float64), dist_reduce_fx="sum"
        )
        self.add_state(
            "units", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum"
        )

    def update(self, values: Tensor) -> None:
        """Add the units of a batch, (S, U)."""
        self.sums += values.double().sum(-1)
        self.units += values.shape[-1]

    def compute(self) -> Tensor:
        """Return the means, (S,), also for S = 1."""
        return self.sums / self.units


def resampled(n: int, seed: int) -> Tensor:
    """The numbers of n texts, then of as many that are drawn from them with replacement, each time: (1 + R, n).

    R is `RESAMPLES`. Equal seeds draw equal texts.
    """
    drawn = torch.randint(
        n, (RESAMPLES, n), generator=torch.Generator().manual_seed(seed)
    )
    return torch.cat([torch.arange(n)[None], drawn])


def resampled_counts(n: int, seed: int) -> Tensor:
    """How often each of n texts counts: once, then as often as it is drawn in each resample, (1 + R, n) float64."""
    drawn = resampled(n, seed)
    return torch.zeros(drawn.shape, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones(drawn.shape).double()
    )


def with_interval(values: Tensor) -> Figures:
    """A figure and the ends of its 95 % percentile interval, each (...), from it and its resamples, (..., 1 + R)."""
    tail = (1 - LEVEL) / 2
    low, high = torch.nanquantile(
        values[..., 1:], torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=-1
    )
    return values[..., 0], low, high


def named(name: str, figures: Iterable[Any]) -> dict[str, Any]:
    """A report's columns of a figure and of the ends of its interval: `name`, `name_low` and `name_high`."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), figures, strict=True))


def per_text_sums(values: Tensor, rows: Rows | Targets) -> Tensor:
    """Sum over the rows or units of each text of a batch: (..., N) -> (..., B); zero for a text without any."""
    return values.new_zeros(*values.shape[:-1], rows.texts).index_add_(
        -1, rows.owner, values
    )


def of_unseen(values: Tensor, rows: Rows) -> Tensor:
    """Set values of rows (..., N) to zero except for rows of unseen types; all NaN where types are not known."""
    return (
        torch.full_like(values, torch.nan)
        if rows.unseen is None
        else values.where(rows.unseen, 0)
    )


def interval(values: Tensor, weights: Tensor | None = None, *, seed: int) -> Figures:
    """A mean over texts, or a ratio of sums, with the ends of its 95 % percentile interval over resampled texts.

    Args:
        values: (..., n) one number for each text.
        weights: (..., n) denominators; default: 1 for each text.
        seed: the seed of the resampling; equal seeds draw equal texts, so intervals of methods can be compared.

    Returns:
        The mean, and the lower and upper end, each (...); the ends are NaN where values are not finite. Resamples with
        a zero denominator do not count.
    """
    counts = resampled_counts(values.shape[-1], seed)
    denominator = counts.sum(1) if weights is None else weights.double() @ counts.T
    mean, *ends = with_interval(values.double() @ counts.T / denominator)
    low, high = (end.where(values.isfinite().all(-1), torch.nan) for end in ends)
    return mean, low, high


def resampled_columns(figures: Mapping[str, Tensor]) -> Row:
    """A report's columns of figures, from each and its resamples, (1 + R,): see `named`."""
    row: Row = {}
    for name, values in figures.items():
        row |= named(name, map(finite, with_interval(values)))
    return row


def mean_columns(name: str, values: Tensor, weights: Tensor, seed: int) -> Row:
    """A report's columns of a ratio of sums (n,) over texts, and of its interval: see `named`."""
    return named(
        name,
        map(finite, interval(values.double().cpu(), weights.double().cpu(), seed=seed)),
    )


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
        raise UserError(
            f"Expected `score` out of {', '.join(known)} for texts with {what}, but got {score!r}."
        )
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
    scores = _FUNCTIONS[score](
        rows.nan_to_num().T, labels.double()[:, None].expand(-1, len(rows))
    )
    return scores.where(rows.isfinite().all(-1), torch.nan).reshape(answers.shape[:-1])


def score_interval(
    score: Score, answers: Tensor, labels: Tensor, *, seed: int
) -> Figures:
    """A score with the ends of its 95 % percentile interval over resampled texts, each (...).

    The arguments are those of `resampled_scores`.
    """
    return with_interval(resampled_scores(score, answers, labels, seed=seed))


def resampled_scores(
    score: Score, answers: Tensor, labels: Tensor, *, seed: int
) -> Tensor:
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
        torch.cat(
            [_FUNCTIONS[score](row[part].T, labels.double()[part].T) for part in parts]
        )
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
    counts = (
        (classes * given + right).bincount(minlength=classes**2).view(classes, classes)
    )
    rows, columns = linear_sum_assignment(counts.cpu(), maximize=True)
    accuracy, best = (
        int(part.sum()) / len(right) for part in (counts.diag(), counts[rows, columns])
    )
    if best - accuracy <= max(FAR_BELOW, 2 / len(right) ** 0.5):
        return None
    order = ", ".join(
        f"{k} as {int(place)}"
        for k, place in zip(rows, columns, strict=True)
        if k != place
    )
    return (
        f"Caution: {model} by itself has an accuracy of {accuracy:.1%} on the held-out texts, and would have "
        f"{best:.1%} with its classes in another order ({order}). They probably do not stand in that of the texts': "
        "say which are which by `--data.labels`."
    )


def _f1(answers: Tensor, labels: Tensor) -> Tensor:
    whole = answers.T.long(), labels.T.long()
    return binary_f1_score(
        *whole, multidim_average="samplewise", validate_args=False
    ).double()


def _correlation(
    function: Callable[[Tensor, Tensor], Tensor], answers: Tensor, labels: Tensor
) -> Tensor:
    """Correlate the columns of (n, R) and (n, R); 0 if one is constant, where torchmetrics gives NaN and a warning."""
    spread = torch.stack(
        [values.amax(0) - values.amin(0) for values in (answers, labels)]
    )
    constant = (spread == 0).any(0)
    ramp = torch.arange(len(answers), dtype=torch.float64)[:, None].expand_as(answers)
    # Correlations do not depend on the unit, but torchmetrics warns about numbers that are close to each other.
    sides = zip((answers, labels), spread, strict=True)
    scaled = [
        torch.where(constant, ramp, (values - values.amin(0)) / scale)
        for values, scale in sides
    ]
    return function(*scaled).reshape(-1).double().where(~constant, 0.0)


_FUNCTIONS: dict[Score, Callable[[Tensor, Tensor], Tensor]] = {
    "accuracy": lambda answers, labels: (answers == labels).double().mean(0),
    "mcc": partial(
        _correlation, pearson_corrcoef
    ),  # for classes 0 and 1 this is Matthews' correlation
    "f1": _f1,
    "pearson": partial(_correlation, pearson_corrcoef),
    "spearman": partial(_correlation, spearman_corrcoef),
}


@dataclass(frozen=True)
class ScoredTask:
    """The task shared by the scored models.

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
            return (
                cls("causal", data.bytes_per_token("test")) if causal else cls("masked")
            )
        regression, texts = model.regression, data.texts
        if regression:
            texts.check_numbers()
        labels = cast(Tensor, data.split("test").labels)
        classes = 0 if regression else texts.classes
        score = choose_score(data.text, regression=regression, classes=classes)
        order = torch.randperm(
            len(labels), generator=torch.Generator().manual_seed(seed)
        )
        labels = labels.float() if regression else labels
        random = (
            labels[order] if regression else random_labels(len(labels), classes, seed)
        )
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
        return float(
            task_score(
                self.score, torch.full(self.labels.shape, self.constant), self.labels
            )
        )
