"""The fate of an artefact: against SciPy and scikit-learn, and against what comes true."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from tests.aligners.probing.artefacts.made import ARTEFACTS, about, draw, head, paired

from aligners.probing.artefacts.fate import (
    attenuated,
    auroc,
    fate,
    measured_score,
    own_score,
    rank_correlation,
    scores_of,
    text_weights,
    verdict,
    with_labels,
)
from aligners.probing.artefacts.kinds import Head


def test_statistics_of_resampled_texts_are_those_of_rows_that_are_there_more_than_once() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    x, y = (draw(60, seed=seed).mul(2).round() for seed in (1, 2))  # with ties
    weights = text_weights(torch.arange(60) // 3, 0)[:4]
    correlations, areas = rank_correlation(x, x + y, weights), auroc(x, y > 0, weights)
    assert weights[0].eq(1).all()
    for r, counts in enumerate(weights):
        rows = np.repeat(np.arange(60), counts.int().numpy())
        assert float(correlations[r]) == pytest.approx(spearmanr(x[rows], (x + y)[rows]).statistic, abs=1e-9)
        assert float(areas[r]) == pytest.approx(metrics.roc_auc_score(y[rows] > 0, x[rows]), abs=1e-9)
        assert all(len(part.unique()) == 1 for part in counts.split(3))
    assert auroc(x, torch.ones(60, dtype=torch.bool), weights).isnan().all()


def test_the_formula_of_attenuation_comes_true() -> None:
    """Two normal classes; noise that does not depend on the class."""
    labels = torch.arange(40_000) % 2
    for d, noise in ((1.0, 0.5), (2.0, 1.0), (3.0, 2.0), (1.0, 0.0)):
        old = draw(40_000, seed=1).double() + d * labels
        new = old + noise * draw(40_000, seed=2).double()
        ones = torch.ones(1, 40_000, dtype=torch.float64)
        predicted = attenuated(auroc(old, labels == 1, ones), rank_correlation(old, new, ones))
        assert float(predicted) == pytest.approx(float(auroc(new, labels == 1, ones)), abs=0.015)


def test_the_score_of_its_owner_has_the_interval_of_its_texts() -> None:
    draws = own_score(head(score={"metric": "auroc", "value": 0.9, "n": 100}), 4000, 0)
    assert draws is not None
    assert float(draws[0]) == pytest.approx(0.9)
    assert float(draws.std()) == pytest.approx(0.032, abs=0.002)  # Hanley and McNeil's table: 50 and 50
    assert own_score(head(), 5, 0) is None
    assert own_score(head(score={"metric": "accuracy", "value": 0.9}), 5, 0) is None


@pytest.mark.parametrize("kind", ["head", "network", "direction", "dictionary", "edge", "stitching"])
def test_a_perfect_map_promises_everything(kind: str) -> None:
    artefact, rows = ARTEFACTS[kind], paired("rotated")
    weights, old = text_weights(rows.text, 0), artefact.answers(rows.old)
    same, other = (fate(artefact, old, answers, None, weights) for answers in (old, old[torch.randperm(len(old))]))
    assert same["rank_correlation"] == pytest.approx(1)
    assert same["fidelity"] == pytest.approx(1)
    assert same["fidelity_low"] == pytest.approx(1)
    assert same["agreement"] == 1
    assert other["fidelity"] < 0.65
    assert same["predicted"] is None  # a forecast begins with a score
    assert verdict(None, same, other, 0.8) == "carry"
    assert verdict(None, same, same, 0.8) == "leave as it is"
    assert verdict(None, other, None, 0.8) == "do not use"


def test_of_many_answers_those_that_vary_most_are_compared() -> None:
    old = draw(100, 20) * torch.arange(20)
    scores, decide = scores_of(ARTEFACTS["dictionary"], old)
    assert torch.equal(scores(old), old[:, 12:])
    assert torch.equal(decide(scores(old)), old[:, 12:] > 0)


def test_the_prediction_begins_with_its_owner_s_score() -> None:
    rows = paired("rotated")
    weights = text_weights(rows.text, 0)
    mine = head(score={"metric": "auroc", "value": 0.8, "n": 400})
    old, own = mine.answers(rows.old), own_score(mine, len(weights), 0)
    told = fate(mine, old, old, own, weights)
    assert told["predicted"] == pytest.approx(0.8)
    assert told["predicted_low"] < 0.79 < 0.81 < told["predicted_high"]
    assert verdict(own, told, {"predicted": 0.5}, 0.9) == "carry"
    assert verdict(own, {"predicted": 0.73}, None, 0.8) == "do not use"


def test_a_score_that_is_measured_is_that_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rows = paired("rotated")
    answers, labels = head().answers(rows.old), torch.arange(200) % 2
    labels[:20] = -1
    measured = measured_score(head(), answers, labels, text_weights(rows.text, 0)[:3])
    assert measured.shape == (3,)
    assert float(measured[0]) == pytest.approx(metrics.roc_auc_score(labels[20:], answers[20:, 0]))


def test_a_head_of_one_decision_for_all_is_carried_where_its_scores_are_and_one_at_chance_is_not_used() -> None:
    rows = paired("rotated")
    weights, answers = text_weights(rows.text, 0), head().answers(rows.old) + 1000
    shuffled = answers[torch.randperm(len(answers))]
    same, other = (fate(head(), answers, new, None, weights) for new in (answers, shuffled))
    assert same["fidelity"] == pytest.approx(1)
    assert verdict(None, same, other, 0.8) == "carry"
    useless = own_score(head(score={"metric": "auroc", "value": 0.55, "n": 100}), 1000, 0)
    assert verdict(useless, {"predicted": 0.55}, {"predicted": 0.55}, 0.8) == "do not use"


def test_scores_against_labels_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rows = paired("rotated")
    weights = text_weights(rows.text, 0)
    for classes in (1, 2, 4):
        mine = Head.of(draw(classes, 12), draw(classes, seed=1), **about("head"))
        answers, labels = mine.answers(rows.old), torch.arange(200) % max(classes, 2)
        row = with_labels(mine, [answers], answers, labels, weights)
        if classes < 3:
            score = answers[:, -1] - (answers[:, 0] if classes == 2 else 0)
            expected, right = metrics.roc_auc_score(labels, score), ((score > 0) == labels).float().mean()
        else:
            logits = answers.double()
            others = [logits.index_fill(1, torch.tensor(c), -torch.inf).amax(1) for c in range(classes)]
            expected = np.mean([metrics.roc_auc_score(labels == c, logits[:, c] - others[c]) for c in range(classes)])
            right = (answers.argmax(-1) == labels).float().mean()
        assert row["auroc"] == pytest.approx(expected)
        assert row["accuracy"] == pytest.approx(float(right))
        assert row["auroc_low"] < row["auroc"] < row["auroc_high"]
    assert not math.isnan(row["accuracy_low"])
