"""Means over pairs and their intervals over models; tests by permutation of models and their rate of false alarms."""

from itertools import combinations, product

import numpy as np
import pandas as pd
import pytest
from tests.aligners.reports.study.rows import MODELS, inject

from aligners.injection.scoring.pair_intervals import OVER_BASES, OVER_COPIES, OVER_MODELS, over_pairs
from aligners.reports.study.statistics import RANGE_OF_PAIRS, group_test, holm, over_models, sign_test

PAIRS = list(combinations("abcdef", 2))


def pairs(values: list[float], of: list[tuple[str, str]] = PAIRS) -> pd.Series:
    return pd.Series(values, index=pd.Index(of, tupleize_cols=False))


def test_the_sign_test_counts_all_signs_of_the_models_shares() -> None:
    values = np.random.default_rng(0).normal(0.3, 1, len(PAIRS))
    found = sign_test(pairs(list(values)))
    mean = values.mean()
    shares = []
    for model in "abcdef":
        rest = values[[model not in pair for pair in PAIRS]]
        shares.append(6 * mean - 5 * rest.mean())
    far = [abs(np.dot(signs, shares)) >= abs(sum(shares)) - 1e-12 for signs in product((1, -1), repeat=6)]
    assert found.p == pytest.approx(np.mean(far))
    assert (found.difference, found.models) == (pytest.approx(mean), 6)
    assert found.least == 2 / 64
    every = sign_test(pairs([1 + n / 100 for n in range(len(PAIRS))]))
    assert every.p == every.least


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


def test_the_group_test_counts_all_ways_to_deal_the_models() -> None:
    groups = dict(zip("abcdef", "xxxyyy", strict=True))
    found = group_test(pairs([float(groups[x] != groups[y]) for x, y in PAIRS]), groups)
    assert found.difference == 1.0
    assert found.p == pytest.approx(2 / 20)  # the two deals that are the groups themselves
    assert found.least == 1 / 20


def test_many_models_are_dealt_by_a_seed() -> None:
    groups = {f"m{n}": "x" if n < 10 else "y" for n in range(20)}
    of = list(combinations(groups, 2))
    values = pairs([float(groups[x] != groups[y]) for x, y in of], of)
    found = group_test(values, groups)
    assert found == group_test(values, groups)
    assert (found.least, found.p) == (1 / 9_999, pytest.approx(1 / 10_000))


def test_fewer_than_three_models_one_group_or_no_pair_within_is_no_test() -> None:
    assert sign_test(pairs([1.0], [("a", "b")])) is None
    assert group_test(pairs([1.0] * 15), dict.fromkeys("abcdef", "x")) is None
    assert group_test(pairs([1.0], [("a", "b")]), {"a": "x", "b": "y"}) is None


def test_holm_adjusts_from_the_smallest() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])


def test_copies_of_one_pretraining_change_their_signs_and_are_dealt_together() -> None:
    bases = {model: model.upper() if model in "abcd" else "E" for model in "abcdef"}  # e and f are copies of E
    found = sign_test(pairs([1 + n / 100 for n in range(len(PAIRS))]), bases)
    assert (found.models, found.least) == (5, 2 / 2**5)
    groups = dict(zip("abcdef", "xxyyyy", strict=True))
    of_groups = pairs([float(groups[x] != groups[y]) for x, y in PAIRS])
    found = group_test(of_groups, groups, bases)
    assert (found.models, found.least, found.p) == (5, 1 / 10, 1 / 10)  # A and B out of five
    assert group_test(of_groups, groups).least == 1 / 15
    assert group_test(of_groups, groups, bases | {"b": "E"}) is None  # E in both groups
    assert group_test(of_groups, groups, dict.fromkeys("abcdef", "E")) == group_test(of_groups, groups)


# ---------------------------------------------------------------------- means over pairs


def frame(models: tuple[str, ...] = MODELS) -> pd.DataFrame:
    rows = pd.DataFrame(inject(["sst2"], models))
    chosen = {"stage": "pretrained", "method": "linear", "site_x": 1, "site_y": 1}
    return rows[(rows[[*chosen]] == pd.Series(chosen)).all(axis=1) & (rows["model_x"] != rows["model_y"])]


def test_an_estimate_is_the_mean_of_pairs_with_the_jackknife_of_stitching() -> None:
    rows = frame()
    found = over_models(rows, "mse")
    (expected,) = over_pairs(rows.to_dict("records"), quantities=("mse",))
    assert (found.mean, found.low, found.high) == pytest.approx(
        (expected["mse"], expected["mse_low"], expected["mse_high"])
    )
    assert found.sd == pytest.approx(np.std(rows["mse"], ddof=1))
    assert (found.pairs, found.models, found.interval) == (28, 8, OVER_MODELS)


def test_both_ways_of_a_pair_and_its_layers_are_one_value_whatever_their_order() -> None:
    rows = frame()
    back = rows.rename(columns={"model_x": "model_y", "model_y": "model_x"})
    back = back.assign(mse=back["mse"] + 0.02)
    one, two = (over_models(each, "mse") for each in (rows, pd.concat([rows, back])))
    assert two.mean == pytest.approx(one.mean + 0.01)
    assert (two.pairs, two.sd) == (one.pairs, pytest.approx(one.sd))


def test_a_pair_that_lacks_a_value_is_left_out_and_counted() -> None:
    rows = frame().reset_index(drop=True)
    rows.loc[0, "mse"] = None
    found = over_models(rows, "mse")
    assert (found.pairs, found.lost) == (27, 1)
    assert found.mean == pytest.approx(rows["mse"].astype(float).mean())
    assert over_models(rows.assign(mse=None), "mse") is None


def test_few_models_have_a_range_and_one_pair_has_neither() -> None:
    few = over_models(frame(MODELS[:3]), "mse")
    assert few.interval == RANGE_OF_PAIRS
    assert (few.low, few.high) == (frame(MODELS[:3])["mse"].min(), frame(MODELS[:3])["mse"].max())
    one = over_models(frame(MODELS[:2]), "mse")
    assert (one.sd, one.low, one.high) == (None, None, None)


@pytest.mark.parametrize("named", [False, True], ids=["NAME#2", "models.bases"])
def test_the_interval_over_pretrained_models_holds_the_truth_and_that_over_copies_does_not(named: bool) -> None:
    """Six pretrained models with three fine-tunings each, effects of both and a rest of each pair; the truth is 0."""
    draw, trials, held, held_by_models = np.random.default_rng(0), 200, 0, 0
    models = [(base, copy) for base in "abcdef" for copy in ("", "#2", "#3")]
    of = [(x, y) for x, y in combinations(models, 2) if x[0] != y[0]]
    rows = pd.DataFrame({"model_x": ["".join(x) for x, _ in of], "model_y": ["".join(y) for _, y in of]})
    if named:
        rows = rows.replace("#", "-", regex=True).assign(base_x=[x for (x, _), _ in of], base_y=[y for _, (y, _) in of])
    for _ in range(trials):
        base = dict(zip("abcdef", draw.normal(0, 1, 6), strict=True))
        tuned = {model: base[model[0]] + draw.normal(0, 0.3) for model in models}
        rows["value"] = [tuned[x] + tuned[y] + draw.normal(0, 0.3) for x, y in of]
        found = over_models(rows, "value")
        held += found.low <= 0 <= found.high
        naive = {f"model_{side}": rows[f"model_{side}"].str.replace("#", "-") for side in "xy"}
        by_models = over_models(rows[["value"]].assign(**naive), "value")
        held_by_models += by_models.low <= 0 <= by_models.high
        assert (found.interval, by_models.interval) == (OVER_BASES, OVER_MODELS)
    assert 0.92 <= held / trials <= 0.99
    assert held_by_models / trials < 0.85  # why copies are not taken for independent


def test_intervals_say_what_they_are_over() -> None:
    rows = frame().astype({"model_x": str, "model_y": str})
    assert over_models(rows.assign(base_x="bert", base_y="bert"), "mse") == over_models(rows, "mse")._replace(
        interval=OVER_COPIES
    )
    few = rows.assign(**{f"base_{side}": rows[f"model_{side}"].str[0] for side in "xy"})
    assert over_models(few, "mse").interval == RANGE_OF_PAIRS  # two pretrained models, however many copies
    groups = {model: model[0] for model in MODELS}
    across = rows[rows["model_x"].str[0] != rows["model_y"].str[0]]
    same = over_models(across.assign(base_x="bert", base_y="bert"), "mse", groups)
    assert same == over_models(across, "mse", groups)._replace(interval=OVER_COPIES)
    both = across.assign(**{f"base_{side}": across[f"model_{side}"].str[-1] for side in "xy"})  # a:0 and b:0 are of 0
    both = over_models(both[both["base_x"] != both["base_y"]], "mse", groups)
    assert both.interval == OVER_BASES  # four, which are left out of both groups at once
