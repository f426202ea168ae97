from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap

from aligners.injection.scoring.scores import TextScores, bootstrap_interval


def table(values: torch.Tensor, batches: list[list[int]]) -> TextScores:
    scores = TextScores(["a", "b"], 2, 3, values.shape[-1])
    for text in batches:
        scores.update(torch.tensor(text), {"a": values[0][..., text], "b": values[1][..., text]})
    return scores


def test_every_text_stands_in_its_place_whatever_the_batches() -> None:
    values = torch.randn(2, 2, 3, 7, dtype=torch.float64)
    found = table(values, [[6, 0], [3], [1, 5, 2, 4]]).compute()
    assert list(found) == ["a", "b"]
    torch.testing.assert_close(torch.stack(list(found.values())), values, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("batches", "says"),
    [([[0, 1, 2], [2, 3]], "1 counted twice and 0 never"), ([[0, 2]], "0 counted twice and 2 never")],
)
def test_a_text_counted_twice_or_never_is_an_error(batches: list[list[int]], says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        table(torch.zeros(2, 2, 3, 4), batches).compute()


def test_interval_of_a_mean_is_scipys() -> None:
    values = np.random.default_rng(0).binomial(1, 0.7, 300).astype(float)
    low, high = bootstrap_interval(torch.from_numpy(values), seed=0)
    expected = bootstrap(
        (values,), np.mean, method="percentile", n_resamples=4000, rng=np.random.default_rng(1)
    ).confidence_interval
    assert low == pytest.approx(expected.low, abs=0.01)
    assert high == pytest.approx(expected.high, abs=0.01)


def test_interval_of_a_ratio_resamples_both_sides_together() -> None:
    weights = torch.rand(4, 50, generator=torch.Generator().manual_seed(0)).double() + 0.1
    low, high = bootstrap_interval(3 * weights, weights, seed=0)
    assert low.shape == (4,)
    torch.testing.assert_close(low, torch.full((4,), 3.0).double())
    torch.testing.assert_close(high, torch.full((4,), 3.0).double())


def test_equal_seeds_resample_equal_texts() -> None:
    values = torch.rand(50, generator=torch.Generator().manual_seed(0))
    one = bootstrap_interval(values, seed=3)
    both = bootstrap_interval(torch.stack([values + 1, values]), seed=3)
    assert both[0][1] == one[0]
    assert both[0][0] == pytest.approx(one[0].item() + 1)
    assert bootstrap_interval(values, seed=4) != one
