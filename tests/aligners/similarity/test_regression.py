from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aligners.similarity.algebra.grid import grid_moments
from aligners.similarity.functional.regression import mixedsim, mixedsim_held_out, neuronsim, r2, r2_held_out
from tests.references import measures as reference
from tests.rows import CASES, grid, paired, rows_of

Measure = Callable[..., Tensor]
Reference = Callable[..., float]
ENOUGH = [case for case in CASES if case not in ("few", "barely")]
MEASURES = [(r2, reference.r2), (mixedsim, reference.mixedsim)]
HELD_OUT = [(r2_held_out, reference.r2_held_out), (mixedsim_held_out, reference.mixedsim_held_out)]


@pytest.mark.parametrize(("measure", "expected"), MEASURES)
@pytest.mark.parametrize("case", [*ENOUGH, "barely"])
def test_they_are_their_definitions(measure: Measure, expected: Reference, case: str) -> None:
    x, y = rows_of(case)
    torch.testing.assert_close(measure(x, y), grid(expected, x, y), rtol=1e-8, atol=1e-8)
    if case != "barely":  # there Y has one feature less than X, and X has too few rows to regress on
        torch.testing.assert_close(measure(y, x), grid(expected, y, x), rtol=1e-8, atol=1e-8)
    if "far" not in case:  # float32 cannot hold such rows
        torch.testing.assert_close(measure(x.float(), y.float()), grid(expected, x, y), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("measure", "expected"), HELD_OUT)
@pytest.mark.parametrize("case", ENOUGH)
def test_held_out_they_are_the_fitted_regression_on_new_rows(measure: Measure, expected: Reference, case: str) -> None:
    x, y = rows_of(case)
    half = x.shape[1] // 2
    rows = x[:, :half], y[:, :half], x[:, half:] + 0.1 * x.std(1, keepdim=True), y[:, half:]
    found = measure(grid_moments(*rows[:2]), grid_moments(*rows[2:]))
    torch.testing.assert_close(found, grid(expected, *rows), rtol=1e-8, atol=1e-8)


def test_on_the_fitting_rows_the_held_out_forms_are_the_measures() -> None:
    x, y = rows_of("deficient")
    m = grid_moments(x, y)
    torch.testing.assert_close(r2_held_out(m, m), r2(x, y), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mixedsim_held_out(m, m), mixedsim(x, y), rtol=1e-10, atol=1e-10)


def test_of_unrelated_rows_the_held_out_values_are_not_positive() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 10, 200, 16, generator=draw, dtype=torch.float64)
    halves = grid_moments(x[:, :100], y[:, :100]), grid_moments(x[:, 100:], y[:, 100:])
    assert r2(x[:, :100], y[:, :100]).mean() > 0.1
    assert (r2_held_out(*halves) < 0).all()
    assert abs(float(mixedsim_held_out(*halves).mean())) < 0.01 < 0.3 < mixedsim(x[:, :100], y[:, :100]).mean()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), factor=st.floats(1e-3, 1e3))
def test_what_they_bear(seed: int, factor: float) -> None:
    x, y = paired(60, seed=seed)
    turn = torch.linalg.qr(paired(6, 6, 6, seed + 1)[0])[0]
    stretched = y @ (torch.linalg.qr(paired(5, 5, 5, seed)[0][0])[0] * torch.logspace(-2, 2, 5, dtype=torch.float64))
    torch.testing.assert_close(r2(factor * x @ turn + 4, stretched - 7), r2(x, y), rtol=1e-8, atol=1e-8)
    scaled = x.flip(-1) * torch.tensor([factor, -1, 1, -5, 0.1, 1], dtype=torch.float64)
    torch.testing.assert_close(mixedsim(scaled + 4, stretched - 7), mixedsim(x, y), rtol=1e-8, atol=1e-8)
    assert ((mixedsim(x @ turn, y) - mixedsim(x, y)).abs() > 1e-6).all()


@pytest.mark.parametrize("measure", [r2, mixedsim])
@pytest.mark.parametrize("case", [case for case in ENOUGH if "far" not in case])
def test_of_a_model_with_itself_they_are_one(measure: Measure, case: str) -> None:
    x, _ = rows_of(case)
    torch.testing.assert_close(measure(x, x).diagonal(), torch.ones(3).double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("measure", [r2, mixedsim])
def test_rows_by_which_everything_is_explained_are_refused(measure: Measure) -> None:
    x, y = paired(6)
    with pytest.raises(ValueError, match="at least 7 for the 5 features of `y`, but `moments` hold 6"):
        measure(x, y)


def test_constant_features_are_refused_where_they_are_normalised() -> None:
    x, y = paired(30)
    x[0, :, 1] = 0.1
    assert r2(x, y).isfinite().all()
    with pytest.raises(ValueError, match=r"Mixed similarity, but `x` has 1 constant ones in layers \[0\]"):
        mixedsim(x, y)
    for measure in (r2, mixedsim):
        with pytest.raises(ValueError, match="`y` has 1 constant ones"):
            measure(y, x)


def test_held_out_rows_that_say_nothing_are_refused() -> None:
    x, y = paired(30)
    fitted = grid_moments(x, y)
    still_x, still_y = (rows[:, :1].expand(-1, 5, -1) for rows in (x, y))
    with pytest.raises(ValueError, match="predictions that vary on the rows of `held_out`"):
        mixedsim_held_out(fitted, grid_moments(x[:, :5], still_y))
    with pytest.raises(ValueError, match="Held-out mixed similarity, but `x` has 18 constant ones"):
        mixedsim_held_out(fitted, grid_moments(still_x, y[:, :5]))
    one_layer = fitted._replace(mean_x=x[:, 0])
    with pytest.raises(ValueError, match="differ from the mean of `fitted`"):
        r2_held_out(one_layer, grid_moments(x[:, :1], y[:, :1]))
    for measure in (r2_held_out, mixedsim_held_out):
        with pytest.raises(ValueError, match="layers and widths that `fitted` has"):
            measure(fitted, grid_moments(y, x))


@pytest.mark.parametrize("case", CASES)
def test_it_is_its_definition(case: str) -> None:
    x, y = rows_of(case)
    torch.testing.assert_close(neuronsim(x, y), grid(reference.neuronsim, x, y), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(neuronsim(y, x), grid(reference.neuronsim, y, x), rtol=1e-8, atol=1e-8)
    if "far" not in case:  # float32 cannot hold such rows
        expected = grid(reference.neuronsim, x, y)
        torch.testing.assert_close(neuronsim(x.float(), y.float()), expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), order=st.permutations(range(6)), factor=st.floats(1e-3, 1e3))
def test_neurons_may_change_places_signs_and_scales(seed: int, order: list[int], factor: float) -> None:
    x, y = paired(30, seed=seed)
    moved = x[..., order] * torch.tensor([factor, -1, 1, -5, 0.1, 1], dtype=torch.float64) + 3
    torch.testing.assert_close(neuronsim(moved, y), neuronsim(x, y), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(neuronsim(y, moved), neuronsim(y, x), rtol=1e-8, atol=1e-8)
    turn = torch.linalg.qr(paired(6, 6, 6, seed + 1)[0])[0]
    assert ((neuronsim(x @ turn, y) - neuronsim(x, y)).abs() > 1e-6).all()


@pytest.mark.parametrize("case", CASES)
def test_of_a_model_with_itself_it_is_one(case: str) -> None:
    x, _ = rows_of(case)
    torch.testing.assert_close(neuronsim(x, x).diagonal(), torch.ones(3).double(), rtol=0, atol=1e-12)


def test_constant_neurons_and_two_rows_are_refused() -> None:
    x, y = paired(30)
    with pytest.raises(ValueError, match="at least 3 rows, but `moments` hold 2"):
        neuronsim(x[:, :2], y[:, :2])
    x[:2, :, 3:] = 1 / 3
    with pytest.raises(ValueError, match=r"`x` has 6 constant ones in layers \[0, 1\]"):
        neuronsim(x, y)
