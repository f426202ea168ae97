from __future__ import annotations

from aligners.fitting.outcomes import TRAINED_WELL, no_better_than_the_mean, outcomes, what_did_not_train

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
    assert what_did_not_train(rows) == [
        "* inn at sites 2, 6: untrained start (procrustes).",
        "* inn at site 3→5: diverged at step 33, set back to step 20.",
        "* inn at site 4: diverged at step 3, set back to the untrained start (identity).",
    ]
