from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aligners.similarity.functional.cka import linear_cka, unbiased_cka
from tests.references import measures as reference
from tests.rows import CASES, grid, paired, rows_of

Measure = Callable[..., Tensor]
Reference = Callable[..., float]
MEASURES = [(linear_cka, reference.linear_cka), (unbiased_cka, reference.unbiased_cka)]


@pytest.mark.parametrize(("measure", "expected"), MEASURES)
@pytest.mark.parametrize("case", CASES)
def test_they_are_their_definitions(measure: Measure, expected: Reference, case: str) -> None:
    x, y = rows_of(case)
    torch.testing.assert_close(measure(x, y), grid(expected, x, y), rtol=1e-8, atol=1e-8)
    if "far" not in case:  # float32 cannot hold such rows
        torch.testing.assert_close(measure(x.float(), y.float()), grid(expected, x, y), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("measure", [linear_cka, unbiased_cka])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), factor=st.floats(1e-3, 1e3), shift=st.floats(-1e3, 1e3))
def test_rotating_scaling_and_translating_change_nothing(
    measure: Measure, seed: int, factor: float, shift: float
) -> None:
    x, y = paired(30, seed=seed)
    turn = torch.linalg.qr(paired(6, 6, 6, seed + 1)[0])[0]
    torch.testing.assert_close(measure(factor * x @ turn + shift, y), measure(x, y), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(measure(y, x).T, measure(x, y), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("measure", [linear_cka, unbiased_cka])
@pytest.mark.parametrize("case", CASES)
def test_of_a_model_with_itself_they_are_one(measure: Measure, case: str) -> None:
    x, _ = rows_of(case)
    torch.testing.assert_close(measure(x, x).diagonal(), torch.ones(3).double(), rtol=0, atol=1e-12)


def test_of_unrelated_rows_the_unbiased_one_is_zero_on_average_and_negative_as_often() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 20, 30, 16, generator=draw, dtype=torch.float64)
    unbiased, biased = unbiased_cka(x, y), linear_cka(x, y)
    assert abs(float(unbiased.mean())) < 0.01 < 0.3 < biased.mean()
    assert (unbiased < 0).any()


def test_rows_too_few_for_the_unbiased_estimate_are_refused() -> None:
    x, y = paired(3)
    with pytest.raises(ValueError, match="at least 4 rows, but `moments` hold 3"):
        unbiased_cka(x, y)
    with pytest.raises(ValueError, match="at least 2 rows"):
        linear_cka(x[:, :1], y[:, :1])


def test_an_estimate_that_cannot_normalise_is_refused() -> None:
    _, y = paired(4)
    x = torch.full((1, 4, 2), 0.7, dtype=torch.float64)
    x[0, 0, 0] = 3.1  # one row apart: off its diagonal the Gram matrix of x − 0.7 is 0
    with pytest.raises(ValueError, match=r"positive HSIC of each layer with itself, .* `x` .* layers \[0\]"):
        unbiased_cka(x, y)


def test_a_layer_without_variance_is_refused() -> None:
    x, y = paired(30)
    x[1] = 0.1
    with pytest.raises(ValueError, match=r"`x` has only constant features in layers \[1\]"):
        linear_cka(x, y)
