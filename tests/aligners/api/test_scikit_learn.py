"""scikit-learn's own checks, pipelines and searches take the linear maps."""

import pickle
from typing import Any

import numpy as np
import pytest
from tests.runs import related_rows

from aligners import api
from aligners.api import Linear, Procrustes

pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install '.[dev]'")

from sklearn.base import clone
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

WORDS = "a ValueError, as asked for, but in our words"
TOO_FEW_ROWS = "11 rows of widths 10 and 5 have canonical correlations of 1 whatever they are: refused"
EXCLUDED = {
    "check_estimators_unfitted": "ours is a NotFittedError with the same bases, without a need of scikit-learn",
    "check_dtype_object": "a dictionary among numbers is a ValueError, as every error here, and not a TypeError",
    "check_n_features_in_after_fitting": WORDS,
    "check_complex_data": WORDS,
    "check_estimators_empty_data_messages": WORDS,
    "check_fit2d_1sample": WORDS,
    "check_requires_y_none": WORDS,
}
CANONICAL = {"check_regressor_multioutput": TOO_FEW_ROWS}


class Hotelling(api.CCA):
    """CCA by another name: scikit-learn knows the names of its own cross-decompositions, and asks more of these."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "excluded"),
    [
        *((kind, EXCLUDED) for kind in (api.Linear, api.Ridge, api.Procrustes, api.Permutation)),
        *((kind, EXCLUDED | CANONICAL) for kind in (Hotelling, api.SVCCA, api.PWCCA)),
    ],
)
def test_the_checks_of_an_estimator(kind: type[api.ArrayMap], excluded: dict[str, str]) -> None:
    results = check_estimator(kind(), expected_failed_checks=excluded, on_fail=None, on_skip=None)
    by_status: dict[str, set[str]] = {}
    for result in results:
        by_status.setdefault(result["status"], set()).add(result["check_name"])
    failed = [(result["check_name"], result["exception"]) for result in results if result["status"] == "failed"]
    assert not failed
    assert by_status["xfail"] == set(excluded)  # none is excluded that would pass
    assert by_status.get("skipped", set()) <= {"check_array_api_input"}  # needs SCIPY_ARRAY_API
    assert len(by_status["passed"]) > 40


def data() -> tuple[np.ndarray, np.ndarray]:
    x, y = related_rows(1, 200, 5, 5)
    return x[0].numpy(), y[0].numpy()


def test_least_squares_is_that_of_scikit_learn() -> None:
    x, y = data()
    ours, theirs = Linear(ridge=0).fit(x, y), LinearRegression().fit(x, y)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-9)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, atol=1e-9)


def test_pipelines_searches_and_clones() -> None:
    x, y = data()
    pipeline = make_pipeline(StandardScaler(), Procrustes(scale=True), Linear()).fit(x, y)
    assert pipeline.score(x, y) > 0.9
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(pipeline)).predict(x), pipeline.predict(x))
    assert pipeline._repr_html_()
    search = GridSearchCV(make_pipeline(StandardScaler(), Linear()), {"linear__ridge": [1e-6, 10.0]}, cv=3).fit(x, y)
    assert search.best_params_ == {"linear__ridge": 1e-6}
    scores: Any = cross_val_score(Linear(), x, y, cv=3)
    assert (scores > 0.9).all()
    copy = clone(Linear(ridge=0.3).fit(x, y))
    assert copy.ridge == 0.3
    assert not hasattr(copy, "coef_")
