"""Losses and scores of answers, their intervals over texts and over pairs of models, and who can be asked."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import log_softmax
from tests.tiny import tiny_frozen
from torchmetrics.functional.classification import binary_matthews_corrcoef

from aligners.datamodules.task_targets import Targets, classification_targets, masked_targets
from aligners.datamodules.text.sources import Score, TextSource
from aligners.injection.scoring import task_scores
from aligners.injection.scoring.pair_intervals import OVER_MODELS, RANGE, over_pairs
from aligners.injection.scoring.scores import (
    OF_CLASSES,
    OF_NUMBERS,
    TextScores,
    choose_score,
    interval,
    per_text_sums,
    resampled,
    score_interval,
    task_score,
)
from aligners.injection.scoring.task_scores import (
    agreement,
    batch_answers,
    check_labels,
    chosen,
    divergence,
    unit_answers,
    unit_losses,
)


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        ([[6, 0], [3], [1, 5, 2, 4]], None),
        ([[0, 1, 2, 3], [2, 4, 5, 6]], "1 counted twice and 0 never"),
        ([[0, 2, 3, 4, 5, 6]], "0 counted twice and 1 never"),
    ],
)
def test_every_text_stands_in_its_place_once_whatever_the_batches(batches: list[list[int]], says: str | None) -> None:
    values, scores = torch.randn(2, 2, 3, 7, dtype=torch.float64), TextScores(["a", "b"], 2, 3, 7)
    for text in batches:
        scores.update(torch.tensor(text), {"a": values[0][..., text], "b": values[1][..., text]})
    if says is None:
        assert torch.equal(torch.stack([scores.compute()[name] for name in "ab"]), values)
        return
    with pytest.raises(RuntimeError, match=says):
        scores.compute()


def test_equal_seeds_resample_equal_texts_and_resamples_without_a_row_do_not_count() -> None:
    values = torch.rand(50, generator=torch.Generator().manual_seed(0))
    one, both = (interval(each, seed=3)[1] for each in (values, torch.stack([values + 1, values])))
    assert both.tolist() == pytest.approx([one.item() + 1, one.item()])
    assert interval(values, seed=4)[1] != one
    for end in interval(3 * values, values, seed=0):  # a ratio: both sides together
        assert end == pytest.approx(3)
    values, weights = torch.zeros(1, 20), torch.zeros(1, 20)
    values[0, :2], weights[0, :2] = torch.tensor([1.0, 3.0]), 2.0  # absent from an eighth of the resamples
    assert [figure.item() for figure in interval(values, weights, seed=0)] == [1, 0.5, 1.5]
    values[0, 0] = torch.inf
    assert all(end.isnan().all() for end in interval(values, weights, seed=0)[1:])


REFERENCES: dict[Score, Any] = {
    "accuracy": lambda a, b: (a == b).mean(),
    "mcc": lambda a, b: binary_matthews_corrcoef(torch.tensor(a), torch.tensor(b)).item(),
    "f1": lambda a, b: 2 * (a * b).sum() / (a + b).sum(),
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
    same, low, high = score_interval(score, answers, labels, seed=1)
    references = [REFERENCES[score](row.numpy(), labels.numpy()) for row in answers[0]]
    for each in (found[0], same[0]):
        assert each.tolist() == pytest.approx(references, abs=1e-6)
    if score == "accuracy":
        expected = interval((answers == labels).double(), seed=1)
        torch.testing.assert_close((same, low, high), expected, rtol=0, atol=1e-12)
    values = [REFERENCES[score](answers[0, 1, part].numpy(), labels[part].numpy()) for part in resampled(60, 1)[1:]]
    ends = np.quantile(values, [0.025, 0.975])
    assert (low[0, 1].item(), high[0, 1].item()) == pytest.approx(tuple(ends), abs=1e-6)


@pytest.mark.parametrize("score", ["mcc", "pearson", "spearman", "f1"])
def test_a_constant_answer_is_worth_nothing_and_none_at_all_is_unknown(score: Score) -> None:
    answers, labels = drawn(score, 3, 50)
    answers = answers.double()
    answers[0], answers[1, 3] = 0.0, torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ends = torch.stack([task_score(score, answers, labels), *score_interval(score, answers, labels, seed=0)])
    assert ends[:, 0].tolist() == [0, 0, 0, 0]
    assert ends[:, 1].isnan().all()
    assert ends[:, 2].isfinite().all()


def test_numbers_that_are_close_have_their_correlation_without_a_warning() -> None:
    answers, labels = drawn("pearson", 1, 50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close = task_score("pearson", 3 + 1e-9 * answers.double(), labels)
    assert close.item() == pytest.approx(task_score("pearson", answers, labels).item(), abs=1e-5)


@pytest.mark.parametrize(
    ("source", "given", "classes", "expected"),
    [
        ("cola", None, 2, "mcc"),
        ("mrpc", None, 2, "f1"),
        ("mrpc", "accuracy", 2, "accuracy"),
        ("sst2", None, 2, "accuracy"),
        ("mnli", None, 3, "accuracy"),
        ("stsb", None, 0, "pearson"),
        ("some.csv", None, 0, "pearson"),
        ("some.csv", "spearman", 0, "spearman"),
        ("some.csv", "mcc", 2, "mcc"),
    ],
)
def test_a_task_has_its_score(source: str, given: Any, classes: int, expected: str) -> None:
    """No classes: numbers are predicted."""
    assert choose_score(TextSource(source, score=given), regression=not classes, classes=classes) == expected


@pytest.mark.parametrize(
    ("given", "classes", "says"),
    [
        ("f1", 3, "`score` out of accuracy for texts with 3 classes, but got 'f1'"),
        ("pearson", 2, "out of accuracy, mcc, f1 for texts with 2 classes"),
        ("accuracy", 0, "out of pearson, spearman for texts with numbers to predict"),
        ("auc", 2, "`score` to be one of accuracy, mcc, f1, pearson, spearman, but got 'auc'"),
    ],
)
def test_a_score_of_another_kind_of_task_is_refused(given: Any, classes: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        choose_score(TextSource("some.csv", score=given), regression=not classes, classes=classes)


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


@pytest.mark.parametrize("temperature", [1.0, 0.5, 4.0])
def test_the_divergence_is_that_of_softened_answers_from_the_models_own(temperature: float) -> None:
    logits, own = draw(2, 6, C), draw(6, C, seed=1)
    p, q = (log_softmax(each.double().numpy() / temperature, -1) for each in (own, logits))
    expected = temperature**2 * (np.exp(p) * (p - q)).sum(-1)
    np.testing.assert_allclose(divergence(logits, own.expand(2, -1, -1), temperature).numpy(), expected, rtol=1e-4)
    assert divergence(own, own + 5, temperature).abs().max() < 1e-5


def test_sums_by_text_with_any_leading_axes() -> None:
    values = draw(2, 5)
    expected = torch.stack([values[:, :2].sum(1), torch.zeros(2), values[:, 2:].sum(1)], 1)
    torch.testing.assert_close(per_text_sums(values, asked()), expected)


def test_answers_are_the_likeliest_of_each_unit() -> None:
    targets, logits, own = asked(), draw(4, 5, C), torch.tensor([3, 1, 0, 5, 2])
    found = unit_answers(logits.bfloat16(), targets)  # scored in single precision
    logits = logits.bfloat16().float()
    torch.testing.assert_close(found.loss, unit_losses(logits, targets))
    answers = logits.numpy().argmax(-1)
    np.testing.assert_array_equal(found.answer, answers)
    np.testing.assert_array_equal(found.correct, answers == targets.answer.numpy())
    np.testing.assert_array_equal(agreement(found.answer, own), answers == own.numpy())
    assert all(torch.equal(one, every[2]) for one, every in zip(unit_answers(logits[2], targets), found, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_give_no_answer(bad: float) -> None:
    logits = draw(5, C)
    logits[1, 0] = bad
    found = unit_answers(logits, asked())
    for values in (*found, agreement(found.answer, torch.zeros(5))):
        assert values.isnan().tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("groups", [None, ((1,), (2, 0), (3,), (4,), (5,), (6,), (0,))])
def test_answers_are_the_same_to_the_last_digit_in_any_parts(monkeypatch: pytest.MonkeyPatch, groups: Any) -> None:
    logits, targets = draw(B, T, C).clamp(max=0), asked()  # with ties, of which the first is the answer
    logits[0, 4, 2], logits[2, 2, 1] = math.nan, -math.inf
    expected = unit_answers(chosen(logits, targets, groups), targets)
    first = chosen(logits, targets, groups).argmax(-1).double()
    assert torch.equal(expected.answer[[0, 2, 4]], first[[0, 2, 4]])
    for part in (1, 2 * C, 2**18):
        monkeypatch.setattr(task_scores, "PART", (part, part))
        found = batch_answers(logits, targets, groups)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    nothing = batch_answers(logits, masked_targets(torch.full((B, T), -100)), groups)
    assert [len(values) for values in nothing] == [0, 0, 0]


def test_labels_that_the_head_does_not_know_are_refused() -> None:
    classifier = tiny_frozen("bert", n_labels=3)
    check_labels(classifier, torch.arange(3), "here")
    for model, labels, says in (
        (classifier, None, r"needs labels, but the texts of 'here'.*`label_column`"),
        (classifier, torch.tensor([0, 3]), r"labels 0\.\.2, as the head of .* has.*'here' have labels 0\.\.3"),
        (classifier, torch.tensor([-2, 1]), r"'here' have labels -2\.\.1"),
        (classifier, torch.tensor([-1, 1]), r"a label for every text, but 1 of 2 texts of 'here' have none \(-1"),
        (classifier, torch.tensor([0.5, math.nan]), r"a label for every text, but 1 of 2"),
        (classifier, torch.tensor([0.5, 1.0]), r"classes, as the head of .* have fractional numbers"),
        (
            tiny_frozen(n_labels=None),
            torch.tensor([0, 1]),
            r"needs a model with a classification head, but .* has none",
        ),
        (tiny_frozen(problem_type="regression"), torch.tensor([0.5, 1.0]), r"predicts 2 numbers at once"),
        (tiny_frozen(problem_type="multi_label_classification"), torch.tensor([0, 1]), r"2 questions of yes or no"),
    ):
        with pytest.raises(ValueError, match=says):
            check_labels(model, labels, "here")


# ---------------------------------------------------------------------- over pairs of models

Row = dict[str, Any]


def rows(
    models: Sequence[str], penalty: Callable[[int, int], float | None], site: int = 1, method: str = "linear"
) -> list[Row]:
    """Every route at one site; `penalty` of the numbers of source and target."""
    return [
        {
            **{"model_x": x, "model_y": y, "method": method, "role": "method", "site_x": site, "site_y": site},
            **dict.fromkeys(("penalty", "score_penalty"), penalty(i, j)),
        }
        for i, x in enumerate(models)
        for j, y in enumerate(models)
    ]


def only(found: list[Row], group: str) -> Row:
    (row,) = [row for row in found if row["group"] == group]
    return row


def test_a_group_is_averaged_over_its_routes_at_each_site_and_method() -> None:
    given = (
        rows("abc", lambda i, j: 10 * i + j) + rows("abc", lambda i, j: 1.0, 2) + rows("abc", lambda i, j: 2.0, 1, "x")
    )
    native = {"model_x": "a", "model_y": "b", "method": "native", "role": "ceiling", "site_x": None, "penalty": 0.0}
    found = over_pairs([native, *given])
    assert len(found) == 6
    different, same = (only(found[:2], group) for group in ("different models", "same model"))
    names = ("penalty", "n_routes", "n_models", "interval", "penalty_low", "penalty_high")
    assert [different[name] for name in names] == [11, 6, 3, RANGE, 1, 21]  # too few models for another interval
    assert [same[name] for name in names] == [11, 3, 3, RANGE, 0, 22]
    assert [row["penalty"] for row in found[2:]] == [1, 1, 2, 2]


def test_groups_are_named_by_direction_as_in_the_paper() -> None:
    found = over_pairs(rows("abcd", lambda i, j: 10 * i + j), {"good": ["a", "d"], "poor": ["b", "c"]})
    means = {row["group"]: (row["penalty"], row["n_routes"]) for row in found}
    assert means == {
        "good-to-good": ((3 + 30) / 2, 2),
        "good-to-poor": ((1 + 2 + 31 + 32) / 4, 4),
        "poor-to-good": ((10 + 13 + 20 + 23) / 4, 4),
        "poor-to-poor": ((12 + 21) / 2, 2),
        "same model": ((0 + 11 + 22 + 33) / 4, 4),
    }


def test_models_stitched_with_themselves_are_independent_and_get_students_interval() -> None:
    values = [0.1, 0.4, 0.2, 0.9, 0.3]
    given = rows("abcde", lambda i, j: values[i] if i == j else None)
    found = only(over_pairs(given), "same model")
    expected = stats.t.interval(0.95, 4, loc=sum(values) / 5, scale=stats.sem(values))
    assert (found["penalty_low"], found["penalty_high"]) == pytest.approx(expected)
    assert found["interval"] == OVER_MODELS
    different = only(over_pairs(given), "different models")  # a figure that a route lacks is not averaged over others
    assert [different[f"penalty{end}"] for end in ("", "_low", "_high")] == [None, None, None]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"one": ["a", "b"], "two": ["b", "c"]}, "once and in one group, but got b"),
        ({"one": ["a", "b"], "two": ["c", "d"]}, "among the models that were stitched, but got d"),
        ({"one": ["a", "b"]}, "c is in none. Name a group for it"),
    ],
)
def test_groups_that_do_not_fit_the_models_are_refused(groups: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        over_pairs(rows("abc", lambda i, j: 1.0), groups)


@pytest.mark.parametrize("between", [False, True])
def test_the_interval_holds_the_truth_as_often_as_it_says(between: bool) -> None:
    """Effects of source and target and a rest of each route; the truth is 0."""
    generator = torch.Generator().manual_seed(0)
    groups = {"a": list("abcde"), "b": list("fghijk")} if between else None
    models, trials, held, held_by_routes = "abcdefghijk" if between else "abcdef", 150, 0, 0
    for _ in range(trials):
        source, target = torch.randn(2, len(models), 1, generator=generator)
        table = source + target.T + 0.5 * torch.randn(len(models), len(models), generator=generator)
        row = only(
            over_pairs(rows(models, lambda i, j, table=table: float(table[i, j])), groups),
            "a-to-b" if between else "different models",
        )
        held += row["penalty_low"] <= 0 <= row["penalty_high"]
        off = table[:5, 5:].flatten() if between else table[~torch.eye(len(models), dtype=torch.bool)]
        low, high = stats.t.interval(0.95, len(off) - 1, loc=float(off.mean()), scale=stats.sem(off.numpy()))
        held_by_routes += low <= 0 <= high
    assert 0.92 <= held / trials <= 0.99
    assert held_by_routes / trials < 0.75  # why routes are not taken for independent
