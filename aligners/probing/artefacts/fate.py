"""The fate of a carried artefact, predicted without labels, and its scores, where there are labels."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aligners.injection.scoring.scores import (
    Row,
    resampled_columns,
    resampled_counts,
    with_interval,
)
from aligners.probing.artefacts.dictionaries import Dictionary
from aligners.probing.artefacts.kinds import Artefact, Head

COLUMNS = 8  # of many answers, such as a dictionary's features, as many as are compared; those that vary most
MOST_ROWS = 2000  # number of rows that statistics are computed on, evenly spaced
_WORSE = 0.002  # smallest difference of scores that counts
Scores = Callable[[Tensor], Tensor]


def scores_of(
    artefact: Artefact, old: Tensor
) -> tuple[Scores, Callable[[Tensor], Tensor]]:
    """Return functions that turn answers (N, C) into scores (N, K), and scores into decisions (N, K).

    A head of two classes is scored by the log-odds, a head of more by the margin of each class, with 0 as the
    threshold. Everything else is scored by the answers that vary most; the threshold is the median of the old answers,
    or 0 for the features of a dictionary.

    Args:
        artefact: the artefact that answers.
        old: its answers on the old model.
    """
    if isinstance(artefact, Head):
        if old.shape[1] > 2:
            return margins, _above_zero
        return log_odds, _above_zero

    count = min(COLUMNS, old.shape[1])
    chosen = old.var(0).topk(count).indices.sort().values
    if isinstance(artefact, Dictionary):
        threshold = torch.zeros(())
    else:
        threshold = old[:, chosen].median(0).values
    return lambda answers: answers[
        :, chosen
    ], lambda scores: scores > threshold.to(scores)


def _above_zero(scores: Tensor) -> Tensor:
    return scores > 0


def log_odds(logits: Tensor) -> Tensor:
    """Return the log-odds of the second of two classes, (N, 1): a single logit is the log-odds itself."""
    if logits.shape[1] == 1:
        return logits
    return logits[:, 1:] - logits[:, :1]


def margins(logits: Tensor) -> Tensor:
    """Return how far each logit is above the largest other one, (N, C)."""
    first, second = logits.topk(2, -1).values.split(1, -1)
    largest_other = torch.where(logits == first, second, first)
    return logits - largest_other


def midranks(values: Tensor, weights: Tensor) -> Tensor:
    """Return for each value the weight of all smaller ones plus half that of equal ones: (N,), (R, N) -> (R, N)."""
    order = values.argsort()
    _, place = values[order].unique_consecutive(return_inverse=True)
    distinct = int(place[-1]) + 1
    own = weights.new_zeros(len(weights), distinct).index_add_(
        1, place, weights[:, order]
    )
    ranks = own.cumsum(1) - own / 2
    return torch.empty_like(weights).index_copy_(1, order, ranks[:, place])


def rank_correlation(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Spearman's correlation, (R,), of rows weighted by `weights` (R, N); NaN if one side is constant."""
    a = _centred_ranks(x, weights)
    b = _centred_ranks(y, weights)
    covariance = (weights * a * b).sum(1)
    variances = (weights * a * a).sum(1) * (weights * b * b).sum(1)
    return covariance / variances.sqrt()


def _centred_ranks(values: Tensor, weights: Tensor) -> Tensor:
    ranks = midranks(values, weights)
    total = weights.sum(1, keepdim=True)
    return ranks - (weights * ranks).sum(1, keepdim=True) / total


def auroc(scores: Tensor, positive: Tensor, weights: Tensor) -> Tensor:
    """Return the chance that a positive row scores higher, (R,), averaged over columns; NaN for a single class."""
    if scores.ndim == 2:
        columns = zip(scores.T, positive.T, strict=True)
        return torch.stack(
            [auroc(column, true, weights) for column, true in columns]
        ).nanmean(0)
    yes, no = weights * positive, weights * ~positive
    return (yes * midranks(scores, no)).sum(1) / (yes.sum(1) * no.sum(1))


def text_weights(text: Tensor, seed: int) -> Tensor:
    """Return how often each row counts: first once, then as often as its text is drawn, (1 + R, N)."""
    _, place = text.unique(return_inverse=True)
    return resampled_counts(int(place.max()) + 1, seed)[:, place]


def attenuated(own: Tensor, correlation: Tensor) -> Tensor:
    """The AUROC of scores that agree with others, whose AUROC is known, up to a rank correlation ρ.

    The model is binormal: d' = √2 Φ⁻¹(own), and r = 2 sin(πρ/6) is the correlation of normal scores. The new scores add
    noise that, given the old score, does not depend on the class. Its variance is (1/r² − 1) of that of all scores,
    which at equal classes is 1 + d'²/4 within classes, so d' becomes d'/√(1 + (1 + d'²/4)(1/r² − 1)).
    """
    d = math.sqrt(2) * torch.special.ndtri(own.clamp(0.0, 1.0 - 1e-6))
    r = 2 * (math.pi * correlation / 6).sin()
    added = (1 / r.square().clamp(min=1e-12) - 1).clamp(min=0)
    noise = (1 + d.square() / 4) * added
    return torch.special.ndtr(r.sign() * d / (2 * (1 + noise)).sqrt())


def _spread(value: float, half: float) -> float:
    """Return the variance of an AUROC times the square of `half`, the number of texts of each class."""
    q1 = value / (2 - value)
    q2 = 2 * value**2 / (1 + value)
    return value * (1 - value) + (half - 1) * (q1 + q2 - 2 * value**2)


def own_score(artefact: Artefact, draws: int, seed: int) -> Tensor | None:
    """Return the AUROC that its owner measured, and draws of it from n texts (Hanley and McNeil 1982); None if unknown.

    Args:
        artefact: artefact with a `score`: `metric` auroc, its `value`, and the number `n` of texts that it was measured
            on.
        draws: R, the number of draws.
        seed: seed of the draws.
    """
    score: Mapping[str, Any] = artefact.about.get("score") or {}
    if score.get("metric") != "auroc" or score.get("value") is None:
        return None
    value = float(score["value"])
    noise = torch.randn(draws, generator=torch.Generator().manual_seed(seed)).double()
    noise[0] = 0
    if not score.get("n"):
        return (value + 0 * noise).clamp(0, 1)
    half = max(float(score["n"]) / 2, 1.0)  # number of texts of each class
    spread = _spread(value, half)
    return (value + noise * math.sqrt(spread) / half).clamp(0, 1)


def measured_score(
    artefact: Artefact, answers: Tensor, labels: Tensor, weights: Tensor
) -> Tensor:
    """Return the AUROC of an artefact's answers on the old model against labels, with its resamples, (1 + R,).

    Args:
        artefact: a head or a direction.
        answers: (N, C).
        labels: (N,) the artefact's class of each row, -1 for none.
        weights: see `text_weights`.
    """
    known = labels >= 0
    score, _ = scores_of(artefact, answers)
    scores = score(answers[known].double())
    return auroc(scores, _positive(scores, labels[known]), weights[:, known])


def _mean_correlation(before: Tensor, after: Tensor, weights: Tensor) -> Tensor:
    """Return the mean rank correlation of the columns of two scores (N, C), and resamples of it, (1 + R,)."""
    pairs = zip(before.T, after.T, strict=True)
    of_columns = [rank_correlation(a, b, weights) for a, b in pairs]
    return torch.stack(of_columns).nanmean(0)


def fate(
    artefact: Artefact, old: Tensor, new: Tensor, own: Tensor | None, weights: Tensor
) -> Row:
    """Compare the artefact's answers on the old model with those on the new one.

    Args:
        artefact: the artefact that answers.
        old: its answers (N, C).
        new: answers of the carried artefact, or of the stale one.
        own: the artefact's AUROC on the old model, and resamples of it, (1 + R,); None if unknown.
        weights: see `text_weights`.

    Returns:
        Rank correlation of the scores; fidelity, the AUROC of the new scores against the old decisions, or against the
        upper half of the old scores where all rows are decided alike; agreement of the decisions; and `predicted`, the
        score on the old model `attenuated`, None if that is unknown. Each has an interval.
    """
    score, decide = scores_of(artefact, old)
    before, after = score(old.double()), score(new.double())
    decided = decide(before)
    # if all rows get one decision, there is no AUROC
    alike = (decided == decided[0]).all(0)
    halves = decided.where(~alike, before > before.median(0).values)

    correlation = _mean_correlation(before, after, weights)
    agreeing = (decide(after) == decided).all(-1)
    predicted = torch.full_like(correlation, torch.nan)
    if own is not None:
        predicted = attenuated(own, correlation)
    columns = {
        "rank_correlation": correlation,
        "fidelity": auroc(after, halves, weights),
        "agreement": (weights * agreeing).sum(1) / weights.sum(1),
        "predicted": predicted,
    }
    return resampled_columns(columns)


def verdict(own: Tensor | None, carried: Row, stale: Row | None, least: float) -> str:
    """Advise `carry`, `leave as it is`, or `do not use`, also where the score on the old model is at chance.

    Where that score is unknown, the agreement with the old answers (fidelity) decides, whose maximum is 1.

    Args:
        own: as in `fate`.
        carried: the `fate` of the carried artefact.
        stale: the `fate` of the unchanged artefact; None where it cannot read the new model.
        least: share of its score above chance that must be kept.
    """
    if own is None:
        column, known, surely = "fidelity", 1.0, 1.0
    else:
        column = "predicted"
        known, surely, _ = map(float, with_interval(own))
    after = _score_or_worst(carried, column)
    before = _score_or_worst(stale, column)
    if surely <= 0.5 or max(after, before) < 0.5 + least * (known - 0.5):
        return "do not use"
    if before > after - _WORSE:
        return "leave as it is"
    return "carry"


def _score_or_worst(row: Row | None, column: str) -> float:
    if row is None or row[column] is None:
        return -1.0
    return row[column]


def _positive(scores: Tensor, labels: Tensor) -> Tensor:
    """Return which rows are of the class that each column of scores is for, (N, K): the second class, if K is 1."""
    classes = torch.arange(scores.shape[1])
    if len(classes) == 1:
        classes = torch.ones(1)
    return labels[:, None] == classes


def with_labels(
    artefact: Artefact,
    each: Sequence[Tensor],
    old: Tensor,
    labels: Tensor,
    weights: Tensor,
) -> Row:
    """Return AUROC, and accuracy for a head, against labels (N,), with intervals, as means over answers.

    Args:
        artefact: the artefact that answers.
        each: answers (N, C), in one or several draws.
        old: its answers on the old model.
        labels: (N,).
        weights: see `text_weights`.
    """
    score, decide = scores_of(artefact, old)
    scores = [score(answers.double()) for answers in each]
    positive = _positive(scores[0], labels)
    areas = torch.stack([auroc(one, positive, weights) for one in scores]).mean(0)
    accuracy = torch.full_like(areas, torch.nan)
    if isinstance(artefact, Head):
        right = torch.stack([(decide(one) == positive).all(-1) for one in scores])
        accuracy = (weights * right.double().mean(0)).sum(1) / weights.sum(1)
    return resampled_columns({"auroc": areas, "accuracy": accuracy})
