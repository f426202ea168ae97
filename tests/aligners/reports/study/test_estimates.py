"""Means over pairs, and their intervals over models."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from aligners.injection.scoring.pair_intervals import OVER_MODELS, over_pairs
from aligners.reports.study.statistics import RANGE_OF_PAIRS, over_models, pair_means
from tests.aligners.reports.study.rows import MODELS, inject


def frame(models: tuple[str, ...] = MODELS) -> pd.DataFrame:
    rows = pd.DataFrame(inject(["sst2"], models))
    rows = rows[(rows["stage"] == "pretrained") & (rows["method"] == "linear") & (rows["model_x"] != rows["model_y"])]
    return rows[(rows["site_x"] == 1) & (rows["site_y"] == 1)]


def test_an_estimate_is_the_mean_of_pairs_with_the_jackknife_of_stitching() -> None:
    rows = frame()
    found = over_models(rows, "mse")
    assert found is not None
    (expected,) = over_pairs(rows.to_dict("records"), quantities=("mse",))
    assert (found.mean, found.low, found.high) == pytest.approx(
        (expected["mse"], expected["mse_low"], expected["mse_high"])
    )
    assert found.sd == pytest.approx(np.std(rows["mse"], ddof=1))
    assert (found.pairs, found.models, found.interval) == (28, 8, OVER_MODELS)


def test_both_ways_of_a_pair_and_its_layers_are_one_value() -> None:
    rows = frame()
    back = rows.rename(columns={"model_x": "model_y", "model_y": "model_x"})
    back = back.assign(mse=back["mse"] + 0.02)
    both = pd.concat([rows, back])
    one, two = over_models(rows, "mse"), over_models(both, "mse")
    assert one is not None
    assert two is not None
    assert two.mean == pytest.approx(one.mean + 0.01)
    assert (two.pairs, two.sd) == (one.pairs, pytest.approx(one.sd))


def test_a_pair_that_lacks_a_value_is_left_out_and_counted() -> None:
    rows = frame().reset_index(drop=True)
    rows.loc[0, "mse"] = None
    found = over_models(rows, "mse")
    assert found is not None
    assert (found.pairs, found.lost) == (27, 1)
    assert found.mean == pytest.approx(rows["mse"].astype(float).mean())
    assert over_models(rows.assign(mse=None), "mse") is None


def test_few_models_have_a_range_and_one_pair_has_neither() -> None:
    few = over_models(frame(MODELS[:3]), "mse")
    assert few is not None
    assert few.interval == RANGE_OF_PAIRS
    assert (few.low, few.high) == (frame(MODELS[:3])["mse"].min(), frame(MODELS[:3])["mse"].max())
    one = over_models(frame(MODELS[:2]), "mse")
    assert one is not None
    assert (one.sd, one.low, one.high) == (None, None, None)


def test_pairs_have_no_order_whatever_the_rows_say() -> None:
    rows = pd.DataFrame({"model_x": ["b", "a"], "model_y": ["a", "b"], "v": [1.0, 3.0]})
    assert dict(pair_means(rows, "v")) == {("a", "b"): 2.0}
