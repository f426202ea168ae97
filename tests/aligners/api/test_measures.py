"""Measures on arrays are those of the catalogue."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.references.retrieval import retrieval_scores as scores
from tests.rows import paired

from aligners import api
from aligners.api import cka, measure, mutual_knn, r2, retrieval
from aligners.similarity.catalogue import catalogue
from aligners.similarity.functional import regression

OF_ROWS = [name for name, each in catalogue().items() if each.family in ("moments", "rows", "batches")]


@pytest.mark.parametrize("name", OF_ROWS)
def test_every_measure_of_rows_has_a_function(name: str) -> None:
    x, y = (part[0].numpy() for part in paired(60))
    options = {"batch": 60} if name.endswith("minibatch_cka") else {}
    found = getattr(api, name)(x, y, **options)
    assert isinstance(found, float)
    assert found == pytest.approx(measure(name, x, y))
    assert found == pytest.approx(getattr(api, name)(3 * x, 3 * y, **options))


def test_the_direction_is_that_of_the_formula() -> None:
    x, y = paired(60)
    assert r2(x[0], y[0]) == pytest.approx(float(regression.r2(x[:1], y[:1])))
    assert abs(r2(x[0], y[0]) - r2(y[0], x[0])) > 0.01


@pytest.mark.parametrize(
    ("name", "option"),
    [
        *(
            (name, {"share": 0.5})
            for name in ("svcca", "pwcca", "r2_svcca", "svcca_standardised", "pwcca_standardised")
        ),
        ("rbf_cka", {"width": 2}),
        ("rsa", {"kernel": "linear"}),
        *((name, {"k": 3}) for name in ("mutual_knn", "jaccard_knn", "cknna")),
        ("mutual_knn", {"groups": [f"text {i // 4}" for i in range(60)]}),
    ],
)
def test_options_reach_the_formula(name: str, option: dict[str, Any]) -> None:
    x, y = (part[0] for part in paired(60))
    assert getattr(api, name)(x, y, **option) != pytest.approx(getattr(api, name)(x, y), abs=1e-6)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="paired one by one"):
        cka(np.ones((4, 2)), np.ones((5, 2)))
    rows = np.random.default_rng(0).standard_normal((8, 3))
    for value, kind in ((np.nan, "NaN"), (np.inf, "infinite values")):
        bad = rows.copy()
        bad[2, 1] = value
        with pytest.raises(ValueError, match=f"1 of its 8 rows hold {kind}. Leave these rows out"):
            cka(bad, rows)
    with pytest.raises(ValueError, match="one site at a time"):
        cka(np.ones((2, 4, 2)), np.ones((2, 4, 2)))
    with pytest.raises(ValueError, match="but got 'attnsim_js'"):
        measure("attnsim_js", np.ones((4, 2)), np.ones((4, 2)))
    for groups, says in ((range(7), r"each of the 8 rows, but got .* \(7,\)"), ([1.0, np.nan] * 4, "4 are NaN")):
        with pytest.raises(ValueError, match=says):
            mutual_knn(rows, rows, 2, groups)


def test_retrieval_is_that_of_all_rows_in_every_form_of_array() -> None:
    _, y = (part[0] for part in paired(60))
    mapped = y + 0.4 * paired(60, seed=1)[1][0]
    for centred in (False, True):
        found, expected = (
            retrieval(mapped.numpy(), y, centred=centred),
            scores(mapped.numpy(), y.numpy(), centred=centred),
        )
        assert found == pytest.approx((*expected.mean(1), 60))
        assert 0.1 < found.top1 < found.mrr < found.top10 <= 1
    assert retrieval(y[None], y.tolist()).top1 == 1
    for wrong in (mapped[:, :2], mapped[:50], torch.stack([mapped, mapped])):
        with pytest.raises(ValueError, match=r"`mapped` and `y` of one shape \(N, d\)"):
            retrieval(wrong, y)
