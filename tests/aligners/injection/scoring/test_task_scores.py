from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torchmetrics.functional.classification import binary_matthews_corrcoef

from aligners.injection.scoring.scores import bootstrap_interval, resampled
from aligners.injection.scoring.task_scores import OF_CLASSES, OF_NUMBERS, choose_score, score_interval, task_score
from datamodules.text.sources import Score, TextSource


def f1(answers: np.ndarray, labels: np.ndarray) -> float:
    both = ((answers == 1) & (labels == 1)).sum()
    return 2 * both / ((answers == 1).sum() + (labels == 1).sum())


REFERENCES: dict[Score, Any] = {
    "accuracy": lambda a, b: (a == b).mean(),
    "mcc": lambda a, b: binary_matthews_corrcoef(torch.tensor(a).long(), torch.tensor(b).long()).item(),
    "f1": f1,
    "pearson": lambda a, b: stats.pearsonr(a, b).statistic,
    "spearman": lambda a, b: stats.spearmanr(a, b).statistic,
}


def drawn(score: Score, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randn(shape[-1], generator=draw)
    answers = labels + torch.randn(shape, generator=draw)
    if score in OF_CLASSES:
        return (answers > 0.7).long(), (labels > 0.3).long()
    return answers, (2 * labels).round() / 2  # with ties


@pytest.mark.parametrize("score", [*OF_CLASSES, *OF_NUMBERS])
def test_scores_and_their_intervals_are_the_references(score: Score) -> None:
    answers, labels = drawn(score, 2, 3, 60)
    found = task_score(score, answers, labels)
    low, high = score_interval(score, answers, labels, seed=1)
    again = resampled(60, 1)
    for i in range(2):
        for j in range(3):
            row = answers[i, j].numpy()
            assert found[i, j].item() == pytest.approx(REFERENCES[score](row, labels.numpy()), abs=1e-6)
            values = [REFERENCES[score](row[part], labels.numpy()[part]) for part in again.numpy()]
            ends = np.quantile(values, [0.025, 0.975])
            assert (low[i, j].item(), high[i, j].item()) == pytest.approx(tuple(ends), abs=1e-6)


def test_accuracys_interval_is_that_of_the_mean() -> None:
    answers, labels = drawn("accuracy", 4, 50)
    expected = bootstrap_interval((answers == labels).double(), seed=0)
    torch.testing.assert_close(score_interval("accuracy", answers, labels, seed=0), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("score", ["mcc", "pearson", "spearman", "f1"])
def test_a_constant_answer_is_worth_nothing_and_none_at_all_is_unknown(score: Score) -> None:
    answers, labels = drawn(score, 3, 50)
    answers = answers.double()
    answers[0], answers[1, 3] = 0.0, torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ends = torch.stack([task_score(score, answers, labels), *score_interval(score, answers, labels, seed=0)])
    assert ends[:, 0].tolist() == [0, 0, 0]
    assert ends[:, 1].isnan().all()
    assert ends[:, 2].isfinite().all()


def test_numbers_that_are_close_have_their_correlation_without_a_warning() -> None:
    answers, labels = drawn("pearson", 1, 50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close = task_score("pearson", 3 + 1e-9 * answers.double(), labels)
    assert close.item() == pytest.approx(task_score("pearson", answers, labels).item(), abs=1e-5)


@pytest.mark.parametrize(
    ("source", "given", "regression", "classes", "expected"),
    [
        ("cola", None, False, 2, "mcc"),
        ("mrpc", None, False, 2, "f1"),
        ("mrpc", "accuracy", False, 2, "accuracy"),
        ("sst2", None, False, 2, "accuracy"),
        ("mnli", None, False, 3, "accuracy"),
        ("stsb", None, True, 0, "pearson"),
        ("some.csv", None, True, 0, "pearson"),
        ("some.csv", "spearman", True, 0, "spearman"),
        ("some.csv", "mcc", False, 2, "mcc"),
    ],
)
def test_a_task_has_its_score(source: str, given: Any, regression: bool, classes: int, expected: str) -> None:
    assert choose_score(TextSource(source, score=given), regression=regression, classes=classes) == expected


@pytest.mark.parametrize(
    ("given", "regression", "classes", "says"),
    [
        ("f1", False, 3, "`score` out of accuracy for texts with 3 classes, but got 'f1'"),
        ("pearson", False, 2, "out of accuracy, mcc, f1 for texts with 2 classes"),
        ("accuracy", True, 0, "out of pearson, spearman for texts with numbers to predict"),
    ],
)
def test_a_score_of_another_kind_of_task_is_refused(given: Any, regression: bool, classes: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        choose_score(TextSource("some.csv", score=given), regression=regression, classes=classes)


def test_an_unknown_score_is_refused() -> None:
    with pytest.raises(ValueError, match="`score` to be one of accuracy, mcc, f1, pearson, spearman, but got 'auc'"):
        TextSource("some.csv", score="auc")  # type: ignore[arg-type]
