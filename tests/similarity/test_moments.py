from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from similarity.functional.moments import Moments, merge_moments, moments_of
from similarity.moments import MomentsMetric
from tests.runs import related_rows

ROWS = 60


def close(a: Moments, b: Moments) -> None:
    for name in Moments._fields:
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-10, atol=1e-10, msg=name)


def test_they_are_what_numpy_says() -> None:
    x, y = related_rows(2, ROWS, 5, 3)
    found = moments_of(x.float(), y.float())
    for site in range(2):
        a, b = x[site].float().double().numpy(), y[site].float().double().numpy()
        scatter = np.cov(np.hstack([a, b]).T) * (ROWS - 1)
        np.testing.assert_allclose(found.mean_x[site], a.mean(0), rtol=1e-12)
        np.testing.assert_allclose(found.mean_y[site], b.mean(0), rtol=1e-12)
        np.testing.assert_allclose(found.xx[site], scatter[:5, :5], rtol=1e-10)
        np.testing.assert_allclose(found.yy[site], scatter[5:, 5:], rtol=1e-10)
        np.testing.assert_allclose(found.xy[site], scatter[:5, 5:], rtol=1e-10)
    assert found.n == ROWS
    assert all(value.dtype == torch.float64 for value in found)


@settings(max_examples=40, deadline=None)
@given(cuts=st.sets(st.integers(1, ROWS - 1), max_size=8), offset=st.sampled_from([0.0, 1e3]), seed=st.integers(0, 5))
def test_any_split_into_batches_gives_the_whole(cuts: set[int], offset: float, seed: int) -> None:
    x, y = related_rows(2, ROWS, 5, 3, seed)
    x, y = x + offset, y - offset
    metric = MomentsMetric(2, 5, 3)
    bounds = [0, *sorted(cuts), ROWS]
    for start, end in pairwise(bounds):
        metric.update(x[:, start:end], y[:, start:end])
    close(metric.compute(), moments_of(x, y))


def test_an_offset_of_a_thousand_deviations_cancels_nothing() -> None:
    x, y = related_rows(1, ROWS, 5, 3)
    x, y = x / x.std(), y / y.std()
    near, far = moments_of(x, y), moments_of(x + 1000, y - 1000)
    for name in ("xx", "yy", "xy"):
        torch.testing.assert_close(getattr(far, name), getattr(near, name), rtol=1e-9, atol=1e-9)


def test_nothing_merged_with_rows_is_the_rows() -> None:
    x, y = related_rows(1, ROWS, 5, 3)
    empty = MomentsMetric(1, 5, 3)
    nothing = Moments(*(getattr(empty, name) for name in Moments._fields))
    close(merge_moments(nothing, moments_of(x, y)), moments_of(x, y))
    close(merge_moments(moments_of(x, y), nothing), moments_of(x, y))


def test_swapped_they_are_those_of_the_pairs_turned_round() -> None:
    x, y = related_rows(2, ROWS, 5, 3)
    close(moments_of(x, y).swap(), moments_of(y, x))


def test_half_precision_leaves_the_sums_alone() -> None:
    x, y = related_rows(1, ROWS, 5, 3)
    module = torch.nn.ModuleList([MomentsMetric(1, 5, 3).to(torch.float16)])
    module[0].update(x, y)
    close(module.half()[0].compute(), moments_of(x, y))
