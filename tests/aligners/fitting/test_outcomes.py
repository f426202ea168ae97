from __future__ import annotations

from typing import Any

import pytest

from aligners.fitting.outcomes import (
    MEANING,
    TRAINED_WELL,
    is_trained,
    no_better_than_the_mean,
    outcomes,
    trained_methods,
    what_did_not_train,
)

RECORD = {
    "best_step": [40, 0, 20, 0],
    "diverged_step": [0, 0, 33, 3],
    "start": ["covariance", "procrustes", "linear", "identity"],
    "steps": 60,
}


def test_each_site_is_called_what_it_is() -> None:
    assert outcomes(RECORD, 4) == [
        TRAINED_WELL,
        "untrained start (procrustes)",
        "diverged at step 33, set back to step 20",
        "diverged at step 3, set back to the untrained start (identity)",
    ]
    assert outcomes(None, 2) == [None, None]


def test_maps_that_leave_all_of_the_variance_are_named() -> None:
    fvu = {"linear": (0.9, 1.06, 1.01), "ridge": (0.4, 0.5, 0.999), "cca": (None, 1.0, 2.5), "identity": (4, 4, 4)}
    rows = [
        {"method": name, "role": "floor" if name == "identity" else "method", "fvu": value}
        for name, values in fvu.items()
        for value in values
    ]
    said = "No better than the mean of the target's states at some site, by its largest FVU: linear 1.06, cca 2.5."
    assert no_better_than_the_mean(rows) == [said]
    assert no_better_than_the_mean(rows[3:6]) == []


def test_only_what_did_not_train_is_said_and_where() -> None:
    sites = [(1, 1), (2, 2), (3, 5), (4, 4)]
    rows = [
        {"method": method, "site_x": i, "site_y": j, "training": training}
        for method, record in (("inn", RECORD), ("linear", None))
        for (i, j), training in zip(sites, outcomes(record, 4), strict=True)
    ]
    rows.append({"method": "inn", "site_x": 6, "site_y": 6, "training": "untrained start (procrustes)"})
    assert trained_methods(rows) == ["linear"]
    assert what_did_not_train(rows) == [
        MEANING,
        "* inn at sites 2, 6: untrained start (procrustes).",
        "* inn at site 3→5: diverged at step 33, set back to step 20.",
        "* inn at site 4: diverged at step 3, set back to the untrained start (identity).",
    ]


def test_each_site_is_named_once_and_routes_where_they_differ() -> None:
    """Two directions with the same sites, rows of two kinds, and a third route with another site."""
    routes = [("a", "b", 3), ("a", "b", 6), ("b", "a", 3), ("b", "a", 6)]
    rows = [
        {"method": "mlp", "model_x": x, "model_y": y, "site_x": s, "site_y": s, "rows": kind, "training": "untrained"}
        for x, y, s in routes
        for kind in ("words", "tokens")
    ]
    assert what_did_not_train(rows)[1:] == ["* mlp at sites 3, 6: untrained."]
    other = {**rows[0], "model_x": "c", "site_x": 2, "site_y": 2}
    assert what_did_not_train([*rows, other])[1:] == [
        "* mlp at sites 3, 6, a → b; b → a: untrained.",
        "* mlp at site 2, c → b: untrained.",
    ]


@pytest.mark.parametrize("outcome", [None, float("nan"), TRAINED_WELL])
def test_closed_forms_and_trained_maps_may_be_compared(outcome: Any) -> None:
    assert is_trained({"training": outcome})
    assert is_trained({})
