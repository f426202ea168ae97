from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

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
from tests.tiny import tiny_frozen

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
