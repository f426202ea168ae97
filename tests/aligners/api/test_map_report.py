"""The report of a map on arrays, against the definitions of its figures in NumPy."""

from typing import Any

import numpy as np
import pytest
from tests.runs import related_rows

from aligners.api import MLP, Identity, Linear, Procrustes, Ridge, retrieval

FIT = slice(60)
HELD = slice(60, None)


def arrays(d_y: int = 4, sites: int = 1) -> tuple[np.ndarray, np.ndarray]:
    x, y = related_rows(sites, 100, 4, d_y)
    return x.numpy(), y.numpy()


def fvu(mapped: np.ndarray, y: np.ndarray, mean: np.ndarray) -> float:
    return float(((mapped - y) ** 2).sum() / ((y - mean) ** 2).sum())


def test_figures_are_their_definitions() -> None:
    (x,), (y,) = arrays()
    found = Linear().fit(x[FIT], y[FIT])
    row, mean, same = found.report(x[HELD], y[HELD]).rows()
    mapped, back = found.predict(x[HELD]), found.inverse(y[HELD])
    of_y, of_x = y[FIT].mean(0), x[FIT].mean(0)
    assert row["fvu"] == pytest.approx(fvu(mapped, y[HELD], of_y))
    assert row["r2"] == pytest.approx(found.score(x[HELD], y[HELD]))
    assert row["mse"] == pytest.approx(((mapped - y[HELD]) ** 2).mean())
    assert row["fvu_inverse"] == pytest.approx(fvu(back, x[HELD], of_x))
    assert 0 < row["round_trip"] < 1e-9
    lengths = np.linalg.norm(mapped, axis=1) * np.linalg.norm(y[HELD], axis=1)
    assert row["cosine"] == pytest.approx(((mapped * y[HELD]).sum(1) / lengths).mean())
    expected = retrieval(mapped, y[HELD])
    assert (row["top1"], row["top10"], row["mrr"]) == pytest.approx(expected[:3])
    assert row["top1_centred"] == pytest.approx(retrieval(mapped, y[HELD], centred=True).top1)
    assert (row["n"], row["queries"], row["candidates"], row["groups"]) == (40, 40, 40, 40)

    assert (mean["method"], mean["role"], mean["fvu"]) == ("mean", "floor", pytest.approx(1))
    assert mean["top1"] == pytest.approx(1 / 40)
    assert mean["fvu_inverse"] is mean["round_trip"] is None
    assert same["fvu"] == pytest.approx(fvu(x[HELD], y[HELD], of_y))
    assert same["round_trip"] == 0


def test_the_interval_leaves_out_one_group_at_a_time() -> None:
    (x,), (y,) = arrays()
    found = Procrustes(scale=True).fit(x[FIT], y[FIT])
    groups = np.array(list("abcdefgh")).repeat(5)
    row = found.report(x[HELD], y[HELD], groups).rows()[0]
    mapped, mean = found.predict(x[HELD]), y[FIT].mean(0)
    left = [fvu(mapped[groups != g], y[HELD][groups != g], mean) for g in "abcdefgh"]
    error = np.sqrt(7 / 8 * ((left - np.mean(left)) ** 2).sum())
    quantile = 2.364624  # Student's t with 7 degrees of freedom
    assert row["fvu_high"] - row["fvu"] == pytest.approx(quantile * error, rel=1e-5)
    assert row["fvu"] - row["fvu_low"] == pytest.approx(quantile * error, rel=1e-5)
    assert row["groups"] == 8
    order = np.random.default_rng(0).permutation(40)
    again = found.report(x[HELD][order], y[HELD][order], groups[order]).rows()[0]
    assert again == pytest.approx(row)
    alone = found.report(x[HELD], y[HELD], ["one"] * 40).rows()[0]
    assert alone["fvu_low"] is alone["top1_low"] is None


def test_one_site_of_several_has_the_figures_that_it_has_alone() -> None:
    x, y = arrays(3, sites=2)
    several = Ridge().fit({"a": x[0], "b": x[1]}, {"a": y[0], "b": y[1]})
    rows = several.report({"b": x[1], "a": x[0]}, {"a": y[0], "b": y[1]}).rows()
    assert [(row["site"], row["method"]) for row in rows] == [
        ("a", "Ridge()"), ("a", "mean"), ("b", "Ridge()"), ("b", "mean"),
    ]  # fmt: skip
    alone = several.at("b").report(x[1], y[1]).rows()[0]
    assert {**rows[2], "site": None} == pytest.approx(alone)
    assert rows[2]["fvu_inverse"] is None
    assert "a     Ridge()" in repr(several.report(x, y))


def test_a_network_and_single_precision_have_reports_too() -> None:
    (x,), (y,) = arrays(3)
    x, y = x.astype(np.float32), y.astype(np.float32)
    found = MLP(steps=3, hidden=[4]).fit(x[FIT], y[FIT])
    row, _ = found.report(x[HELD], y[HELD]).rows()
    assert row["r2"] == pytest.approx(found.score(x[HELD], y[HELD]), abs=1e-5)
    assert "fvu_inverse" not in repr(found.report(x[HELD], y[HELD]))


def test_a_file_keeps_the_report(tmp_path: Any) -> None:
    (x,), (y,) = arrays()
    found = Linear().fit(x[FIT], y[FIT])
    found.save(tmp_path / "map.safetensors")
    again = Linear.load(tmp_path / "map.safetensors")
    assert again.report(x[HELD], y[HELD]).rows() == found.report(x[HELD], y[HELD]).rows()
    again.mean_x_ = None  # as in files of earlier versions
    assert again.report(x[HELD], y[HELD]).rows()[0]["fvu_inverse"] is None


def test_rows_that_cannot_be_measured_are_refused() -> None:
    (x,), (y,) = arrays()
    found = Identity().fit(x, y)
    with pytest.raises(ValueError, match=r"as many rows in `y` as in `x`.*99 and 100"):
        found.report(x, y[:99])
    with pytest.raises(ValueError, match="`x` of width 4"):
        found.report(x[:, :3], y)
    bad = y.copy()
    bad[3, 1] = np.nan
    with pytest.raises(ValueError, match="`y` to be finite, but 1 of its 100 rows hold NaN"):
        found.report(x, bad)
    with pytest.raises(ValueError, match=r"`groups` with the text of each of the 100 rows.*\(99,\)"):
        found.report(x, y, np.arange(99))
    with pytest.raises(ValueError, match="differ from the mean of the fitting rows"):
        found.report(x[:2], found.mean_y_.repeat(2, 1).numpy())
    with pytest.raises(ValueError, match=r"Linear\(\) is not"):
        Linear().report(x, y)
