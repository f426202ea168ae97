"""Values, nulls, p-values and intervals of arrays, each computed once more the slow way."""

import numpy as np
import pytest
import torch
from scipy.stats import t as student
from tests.rows import TEN, data_set, paired

import aligners
from aligners.api import cka, compare_arrays, measure
from aligners.api.compare_arrays import _against_nulls, _Arranged, _orders
from aligners.similarity.catalogue import catalogue
from aligners.similarity.controls import calibrated

MEASURES = ("cka", "unbiased_cka", "svcca", "pwcca", "r2", "neuronsim", "minibatch_cka", "rsa", "mutual_knn", "cknna")


def rows(n: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x, y = (part[0].numpy() for part in paired(n, seed=seed))
    return x, y


def test_every_figure_is_that_of_rows_in_another_order() -> None:
    x, y = rows()
    found = compare_arrays(x, y, MEASURES, draws=4, seed=5)
    orders = [order.numpy() for order in _orders(None, 60, 4, 5)[1]]
    assert len({tuple(order) for order in orders}) == 4
    by_name = {row["measure"]: row for row in found.rows()}
    assert list(by_name) == list(MEASURES)
    for name, row in by_name.items():
        value = measure(name, x, y)
        nulls = [measure(name, x, y[order]) for order in orders]
        left_out = [measure(name, *(np.delete(part, range(6 * g, 6 * g + 6), 0) for part in (x, y))) for g in range(10)]
        half = student.ppf(0.975, 9) * np.sqrt(9 * np.var(left_out))
        assert row["value"] == pytest.approx(value, abs=1e-9), name
        assert row["null"] == pytest.approx(np.mean(nulls), abs=1e-9), name
        assert row["effect"] == pytest.approx((value - np.mean(nulls)) / (1 - np.mean(nulls)), abs=1e-8), name
        assert row["p"] == row["p_family"] == (1 + sum(null >= value for null in nulls)) / 5, name
        assert (row["low"], row["high"]) == pytest.approx((value - half, value + half), abs=1e-8), name
        assert (row["n"], row["groups"], row["draws"]) == (60, None, 4)


@pytest.mark.parametrize("case", TEN)
def test_each_data_set_has_the_values_of_the_functions(case: str) -> None:
    x, y = (part[0] for part in data_set(case))
    groups = np.arange(len(x)) // 3
    names = ("cka", "unbiased_cka", "mutual_knn") if case != "few" else ("cka", "unbiased_cka")
    found = compare_arrays(x, y, names, groups=groups, draws=39)
    for row in found.rows():
        name = row["measure"]
        expected = measure(name, x, y) if name != "mutual_knn" else aligners.api.mutual_knn(x, y, groups=groups)
        assert row["value"] == pytest.approx(expected, abs=1e-9)
        assert row["groups"] == -(-len(x) // 3)
        assert row["low"] <= row["value"] <= row["high"]
        assert row["p"] == 1 / 40 or case != "common"
        assert row["p"] > 0.1 or case != "unrelated"


def test_groups_are_kept_together_wherever_their_rows_stand() -> None:
    x, y = rows()
    groups = np.array([f"text {number}" for number in np.arange(60) % 12])
    sizes = torch.full((12,), 5)
    chosen, (order,) = _orders(torch.arange(12).repeat_interleave(sizes), 60, 1, 0)
    assert chosen.tolist() == list(range(60))
    assert (order.view(12, 5) - order.view(12, 5)[:, :1] == torch.arange(5)).all()
    assert sorted(order.tolist()) == list(range(60))
    mixed = np.random.default_rng(0).permutation(60)
    found = compare_arrays(x, y, ("cka", "mutual_knn"), groups=groups, draws=5).rows()
    by_group = np.argsort(np.arange(60) % 12, kind="stable")
    assert found[0]["null"] == pytest.approx(
        np.mean([cka(x[by_group], y[by_group][order]) for order in _orders(torch.arange(60) // 5, 60, 5, 0)[1]])
    )
    again = compare_arrays(x[mixed], y[mixed], ("cka", "mutual_knn"), groups=groups[mixed], draws=5).rows()
    assert [row["value"] for row in again] == pytest.approx([row["value"] for row in found])


def test_rows_of_a_text_make_single_rows_too_easy_to_beat() -> None:
    draw = np.random.default_rng(3)
    text = np.arange(240) // 24
    small = []
    for _ in range(10):  # unrelated, but for the texts that rows of both sides are of
        x, y = (np.repeat(draw.standard_normal((10, 4)), 24, 0) + 0.1 * draw.standard_normal((240, 4)) for _ in "xy")
        p = [compare_arrays(x, y, "unbiased_cka", groups=groups, draws=19).rows()[0]["p"] for groups in (None, text)]
        small.append([value <= 0.05 for value in p])
    single, whole = np.mean(small, 0)
    assert single > 0.8
    assert whole < 0.3


def test_groups_of_unequal_sizes_change_places_with_their_like() -> None:
    draw = np.random.default_rng(5)
    sizes = draw.integers(2, 30, 24)
    text = np.repeat(np.arange(24), sizes)
    place = np.concatenate([np.arange(size) for size in sizes])
    of_place = draw.standard_normal((2, 30, 4))  # on both sides, which are unrelated otherwise
    low = []
    for _ in range(20):
        x, y = (3 * of_place[side, place] + draw.standard_normal((len(text), 4)) for side in range(2))
        low.append(compare_arrays(x, y, "unbiased_cka", groups=text, draws=19).rows()[0]["p"] <= 0.05)
    assert np.mean(low) <= 0.25


def test_values_are_of_all_rows_and_nulls_of_those_that_change_places() -> None:
    x, y = rows()
    text = np.repeat([0, 1], [20, 40])
    (found,) = compare_arrays(x, y, "cka", groups=text, draws=8).rows()
    assert found["value"] == pytest.approx(cka(x, y))
    first, second = np.arange(20), np.arange(20, 40)
    of_x = np.concatenate([first, second])
    possible = {cka(x[of_x], y[np.concatenate(order)]) for order in [(first, second), (second, first)]}
    chosen, orders = _orders(torch.from_numpy(text), 60, 8, 0)
    assert chosen.tolist() == of_x.tolist()
    expected = [cka(x[of_x], y[of_x][order]) for order in orders]
    assert found["null"] == pytest.approx(np.mean(expected))
    assert all(min(abs(value - each) for each in possible) < 1e-9 for value in expected)


def test_p_is_uniform_where_nothing_is_alike() -> None:
    draw = np.random.default_rng(1)
    p = []
    for trial in range(200):
        x, y = (torch.from_numpy(draw.standard_normal((1, 30, 3))) for _ in "xy")
        arranged = _Arranged(x, y, None)
        against = _against_nulls([catalogue()["cka"]], arranged, 9, trial)["cka"]
        p.append(float(calibrated(against.value, against.nulls).p))
    assert np.mean(np.array(p) <= 0.1) == pytest.approx(0.1, abs=0.07)
    assert np.mean(p) == pytest.approx(0.55, abs=0.07)


def test_all_pairs_of_several_sites_and_a_p_value_over_them() -> None:
    x, y = paired(60)
    sites = {"first": x[0].numpy(), "last": x[2].numpy()}
    found = compare_arrays(sites, y, ("cka", "mutual_knn"), draws=19)
    rows_of = found.rows()
    assert [(row["site_x"], row["site_y"]) for row in rows_of[:4]] == [
        ("first", 0),
        ("first", 1),
        ("last", 0),
        ("last", 1),
    ]
    for row in rows_of[:4]:
        alone = compare_arrays(sites[row["site_x"]], y[row["site_y"]], "cka", draws=19).rows()[0]
        assert [row[name] for name in ("value", "null", "effect", "p")] == pytest.approx(
            [alone[name] for name in ("value", "null", "effect", "p")]
        )
        assert row["p_family"] >= row["p"]
        matching = (row["site_x"], row["site_y"]) in (("first", 0), ("last", 1))
        assert (row["low"] is None) != matching
        assert row["low"] is None or row["low"] == pytest.approx(alone["low"])
    assert "site_x" in repr(found)
    assert "p_family" in repr(found)


def test_the_family_wide_p_value_counts_the_largest_effect() -> None:
    value = torch.tensor([[0.5, 0.2], [0.9, 0.1]], dtype=torch.float64)
    nulls = torch.tensor([[[0.1, 0.3], [0.8, 0.0]], [[0.0, 0.1], [0.85, 0.2]], [[0.2, 0.1], [0.7, 0.1]]]).double()
    found = calibrated(value, nulls)
    torch.testing.assert_close(found.null[0], torch.tensor([0.1, 0.5 / 3]).double())
    torch.testing.assert_close(found.effect[0, 0], torch.tensor(0.4 / 0.9).double())
    assert found.p.tolist() == [[0.25, 0.5], [0.25, 0.75]]
    every = np.concatenate([value[None], nulls])
    effects = (every - every.mean(0)) / (1 - every.mean(0))
    largest = effects[1:].max((1, 2))
    expected = [[(1 + (largest >= effects[0, i, j]).sum()) / 4 for j in range(2)] for i in range(2)]
    assert found.p_family.tolist() == expected
    assert calibrated(torch.ones(1, 1).double(), torch.ones(3, 1, 1).double()).effect.isnan().all()


def test_what_cannot_be_compared_is_refused() -> None:
    x, y = rows()
    for change, says in (
        ({"measures": "mutual"}, "`measures` out of cka, .*but got mutual"),
        ({"measures": ()}, "`measures`"),
        ({"draws": 0}, "`draws` to be at least 1"),
        ({"level": 1}, "`level`"),
        ({"groups": np.zeros(60)}, "at least 2 groups"),
        ({"groups": np.arange(59)}, "each of the 60 rows"),
        ({"y": y[:50]}, "as many rows in `y` as in `x`.* 50 and 60"),
        ({"y": y * np.nan}, "finite"),
        ({"y": torch.as_tensor(y) * 1j}, "real numbers, but got a Tensor: torch.complex128 has an imaginary part"),
        ({"x": np.ma.masked_greater(np.asarray(x), 1)}, "real numbers, .* some of its values are masked"),
    ):
        with pytest.raises(ValueError, match=says):
            compare_arrays(**({"x": x, "y": y} | change))  # type: ignore[arg-type]
    whole = np.ma.masked_array(np.asarray(x))  # nothing of which is masked
    assert compare_arrays(whole, y, "cka", draws=1).rows() == compare_arrays(x, y, "cka", draws=1).rows()


def test_an_interval_that_is_refused_is_said() -> None:
    x, y = rows(12)
    found = compare_arrays(x, y, "cca", draws=2)
    assert found.rows()[0]["low"] is None
    assert found.cautions[0].startswith("No interval of cca: ")
    assert found.cautions[0] in repr(found)


def test_the_table_says_what_p_can_be() -> None:
    found = aligners.compare_arrays(*rows(), draws=9)
    assert "60 rows; 9 permutations, so p is at least 0.1; intervals of 95%" in repr(found)
    assert [line.split()[0] for line in repr(found).split("\n")[1:]] == ["measure", "unbiased_cka", "mutual_knn"]
