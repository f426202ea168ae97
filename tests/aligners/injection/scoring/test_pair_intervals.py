from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from scipy import stats

from aligners.injection.scoring.pair_intervals import OVER_MODELS, RANGE, over_pairs

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
    draw = torch.Generator().manual_seed(0)
    groups = {"a": list("abcde"), "b": list("fghijk")} if between else None
    models, trials, held, held_by_routes = "abcdefghijk" if between else "abcdef", 150, 0, 0
    for _ in range(trials):
        source, target = torch.randn(2, len(models), 1, generator=draw)
        table = source + target.T + 0.5 * torch.randn(len(models), len(models), generator=draw)
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
