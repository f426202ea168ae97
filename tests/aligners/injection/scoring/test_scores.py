"""Losses and scores of answers, their intervals, and who can be asked."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import log_softmax
from scipy.stats import bootstrap
from torchmetrics.functional.classification import binary_matthews_corrcoef

from aligners.injection.scoring.scores import TextScores, bootstrap_interval, resampled
from aligners.injection.scoring.task_scores import OF_CLASSES, OF_NUMBERS, choose_score, score_interval, task_score
from aligners.injection.scoring.tasks import (
    agreement,
    check_labels,
    chosen,
    divergence,
    per_text,
    unit_answers,
    unit_losses,
)
from aligners.models import FrozenModel
from datamodules.asking import Targets, classification_targets, masked_targets
from datamodules.text.sources import Score, TextSource
from tests.tiny import tiny_frozen


def table(values: torch.Tensor, batches: list[list[int]]) -> TextScores:
    scores = TextScores(["a", "b"], 2, 3, values.shape[-1])
    for text in batches:
        scores.update(torch.tensor(text), {"a": values[0][..., text], "b": values[1][..., text]})
    return scores


def test_every_text_stands_in_its_place_whatever_the_batches() -> None:
    values = torch.randn(2, 2, 3, 7, dtype=torch.float64)
    found = table(values, [[6, 0], [3], [1, 5, 2, 4]]).compute()
    assert list(found) == ["a", "b"]
    torch.testing.assert_close(torch.stack(list(found.values())), values, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("batches", "says"),
    [([[0, 1, 2], [2, 3]], "1 counted twice and 0 never"), ([[0, 2]], "0 counted twice and 2 never")],
)
def test_a_text_counted_twice_or_never_is_an_error(batches: list[list[int]], says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        table(torch.zeros(2, 2, 3, 4), batches).compute()


def test_interval_of_a_mean_is_scipys() -> None:
    values = np.random.default_rng(0).binomial(1, 0.7, 300).astype(float)
    low, high = bootstrap_interval(torch.from_numpy(values), seed=0)
    expected = bootstrap(
        (values,), np.mean, method="percentile", n_resamples=4000, rng=np.random.default_rng(1)
    ).confidence_interval
    assert low == pytest.approx(expected.low, abs=0.01)
    assert high == pytest.approx(expected.high, abs=0.01)


def test_interval_of_a_ratio_resamples_both_sides_together() -> None:
    weights = torch.rand(4, 50, generator=torch.Generator().manual_seed(0)).double() + 0.1
    low, high = bootstrap_interval(3 * weights, weights, seed=0)
    assert low.shape == (4,)
    torch.testing.assert_close(low, torch.full((4,), 3.0).double())
    torch.testing.assert_close(high, torch.full((4,), 3.0).double())


def test_equal_seeds_resample_equal_texts() -> None:
    values = torch.rand(50, generator=torch.Generator().manual_seed(0))
    one = bootstrap_interval(values, seed=3)
    both = bootstrap_interval(torch.stack([values + 1, values]), seed=3)
    assert both[0][1] == one[0]
    assert both[0][0] == pytest.approx(one[0].item() + 1)
    assert bootstrap_interval(values, seed=4) != one


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
    answers, labels = drawn(score, 1, 2, 60)
    found = task_score(score, answers, labels)
    low, high = score_interval(score, answers, labels, seed=1)
    again = resampled(60, 1)
    for j in range(2):
        row = answers[0, j].numpy()
        assert found[0, j].item() == pytest.approx(REFERENCES[score](row, labels.numpy()), abs=1e-6)
        values = [REFERENCES[score](row[part], labels.numpy()[part]) for part in again.numpy()]
        ends = np.quantile(values, [0.025, 0.975])
        assert (low[0, j].item(), high[0, j].item()) == pytest.approx(tuple(ends), abs=1e-6)


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


B, T, C = 3, 5, 7


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def asked() -> Targets:
    """Five units: two of text 0, none of text 1, three of text 2."""
    answers = torch.full((B, T), -100)
    answers[0, 1], answers[0, 4], answers[2, 0], answers[2, 2], answers[2, 3] = 3, 6, 0, 1, 2
    return masked_targets(answers)


def test_the_chosen_logits_are_those_of_the_units() -> None:
    logits = draw(B, T, C).bfloat16()
    found = chosen(logits, asked())
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.stack([logits[b, t] for b, t in ((0, 1), (0, 4), (2, 0), (2, 2), (2, 3))]).float())
    of_texts = draw(B, C)
    assert torch.equal(chosen(of_texts, classification_targets(torch.tensor([0, 1, 2]))), of_texts)


def test_the_loss_is_the_cross_entropy_in_nats_with_any_leading_axes() -> None:
    targets, logits = asked(), draw(2, 3, 5, C)
    expected = -log_softmax(logits.double().numpy(), -1)[..., np.arange(5), targets.answer.numpy()]
    np.testing.assert_allclose(unit_losses(logits, targets).numpy(), expected, rtol=1e-5)
    assert unit_losses(torch.zeros(5, C), targets).tolist() == pytest.approx([math.log(C)] * 5)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 4.0])
def test_the_divergence_is_that_of_softened_answers_from_the_models_own(temperature: float) -> None:
    logits, own = draw(2, 6, C), draw(6, C, seed=1)
    p, q = (log_softmax(each.double().numpy() / temperature, -1) for each in (own, logits))
    expected = temperature**2 * (np.exp(p) * (p - q)).sum(-1)
    np.testing.assert_allclose(divergence(logits, own.expand(2, -1, -1), temperature).numpy(), expected, rtol=1e-4)
    assert divergence(own, own + 5, temperature).abs().max() < 1e-5


def test_sums_by_text_with_any_leading_axes() -> None:
    values = draw(2, 5).requires_grad_()
    found = per_text(values, asked())
    expected = torch.stack([values[:, :2].sum(1), torch.zeros(2), values[:, 2:].sum(1)], 1)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert torch.equal(values.grad, torch.ones(2, 5))  # type: ignore[arg-type]


def test_answers_are_what_a_loop_over_units_finds() -> None:
    targets, logits, own = asked(), draw(4, 5, C), torch.tensor([3, 1, 0, 5, 2])
    found = unit_answers(logits, targets)
    torch.testing.assert_close(found.loss, unit_losses(logits, targets))
    agree = agreement(found.answer, own)
    for k in range(4):
        for u in range(5):
            answer = logits[k, u].argmax().item()
            assert found.answer[k, u] == answer
            assert found.correct[k, u] == float(answer == targets.answer[u])
            assert agree[k, u] == float(answer == own[u])
    assert all(torch.equal(one, every[2]) for one, every in zip(unit_answers(logits[2], targets), found, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_give_no_answer(bad: float) -> None:
    logits = draw(5, C)
    logits[1, 0] = bad
    found = unit_answers(logits, asked())
    for values in (*found, agreement(found.answer, torch.zeros(5))):
        assert values.isnan().tolist() == [False, True, False, False, False]


def test_sharp_logits_in_half_precision_have_the_loss_of_single_precision() -> None:
    logits = draw(5, C).half()
    torch.testing.assert_close(unit_answers(logits, asked()).loss, unit_losses(logits.float(), asked()))


@pytest.fixture(scope="module")
def classifier() -> FrozenModel:
    return tiny_frozen("bert", n_labels=3)


def test_labels_that_the_head_knows_pass(classifier: FrozenModel) -> None:
    check_labels(classifier, torch.arange(classifier.n_labels or 0), "here")


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (None, r"needs labels, but the texts of 'here'.*`label_column`"),
        (torch.tensor([0, 9]), r"labels 0\.\.\d, as the head of .* answers.*'here' have labels 0\.\.9"),
        (torch.tensor([-2, 1]), r"'here' have labels -2\.\.1"),
        (torch.tensor([-1, 1]), r"a label for every text, but 1 of 2 texts of 'here' have none \(-1"),
        (torch.tensor([0.5, math.nan]), r"a label for every text, but 1 of 2"),
        (torch.tensor([0.5, 1.0]), r"classes, as the head of .* have numbers with fractions"),
    ],
)
def test_labels_that_it_does_not_are_refused(classifier: FrozenModel, labels: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_labels(classifier, labels, "here")


def test_a_model_without_a_classification_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs a model with a classification head, but .* has none"):
        check_labels(tiny_frozen("bert", n_labels=None), torch.tensor([0, 1]), "here")
