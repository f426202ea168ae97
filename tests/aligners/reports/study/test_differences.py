"""Tests by permutation of models: exact counts, and the rate of false alarms where models have effects."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pandas as pd
import pytest

from aligners.reports.study.statistics import group_test, holm, sign_test

PAIRS = list(combinations("abcdef", 2))


def pairs(values: list[float], of: list[tuple[str, str]] = PAIRS) -> pd.Series:
    return pd.Series(values, index=pd.Index(of, tupleize_cols=False))


def test_the_sign_test_counts_all_signs_of_the_models_shares() -> None:
    values = np.random.default_rng(0).normal(0.3, 1, len(PAIRS))
    found = sign_test(pairs(list(values)))
    assert found is not None
    mean = values.mean()
    shares = []
    for model in "abcdef":
        rest = values[[model not in pair for pair in PAIRS]]
        shares.append(6 * mean - 5 * rest.mean())
    far = [abs(np.dot(signs, shares)) >= abs(sum(shares)) - 1e-12 for signs in product((1, -1), repeat=6)]
    assert found.p == pytest.approx(np.mean(far))
    assert (found.difference, found.models) == (pytest.approx(mean), 6)
    assert found.least == 2 / 64


def test_a_difference_of_every_pair_has_the_least_p() -> None:
    found = sign_test(pairs([1 + n / 100 for n in range(len(PAIRS))]))
    assert found is not None
    assert found.p == found.least


@pytest.mark.parametrize("of_models", [0.0, 1.0], ids=["pairs differ", "models differ"])
def test_the_sign_test_gives_as_many_false_alarms_as_it_says(of_models: float) -> None:
    draw = np.random.default_rng(0)
    alarms = 0
    for _ in range(300):
        effect = dict(zip("abcdef", draw.normal(0, of_models, 6), strict=True))
        values = [effect[x] + effect[y] + draw.normal() for x, y in PAIRS]
        found = sign_test(pairs(values))
        alarms += found is not None and found.p <= 0.0626
    assert alarms / 300 < 0.0626 + 0.03  # a sign test of pairs gives .3 where models differ


def test_fewer_than_three_models_are_not_tested() -> None:
    assert sign_test(pairs([1.0], [("a", "b")])) is None


def test_the_group_test_counts_all_ways_to_deal_the_models() -> None:
    groups = dict(zip("abcdef", "xxxyyy", strict=True))
    found = group_test(pairs([float(groups[x] != groups[y]) for x, y in PAIRS]), groups)
    assert found is not None
    assert found.difference == 1.0
    assert found.p == pytest.approx(2 / 20)  # the two deals that are the groups themselves
    assert found.least == 1 / 20


def test_many_models_are_dealt_by_a_seed() -> None:
    names = [f"m{n}" for n in range(20)]
    groups = {name: "x" if n < 10 else "y" for n, name in enumerate(names)}
    of = list(combinations(names, 2))
    values = pairs([float(groups[x] != groups[y]) for x, y in of], of)
    found, again = group_test(values, groups), group_test(values, groups)
    assert found is not None
    assert found == again
    assert found.least == 1 / 9_999
    assert found.p == pytest.approx(1 / 10_000)


def test_one_group_or_no_pair_within_is_no_test() -> None:
    assert group_test(pairs([1.0] * 15), dict.fromkeys("abcdef", "x")) is None
    assert group_test(pairs([1.0], [("a", "b")]), {"a": "x", "b": "y"}) is None


def test_holm_adjusts_from_the_smallest() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
