from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aligners.similarity.algebra.grid import grid_moments
from aligners.similarity.functional.cca import SharedMoments, cca, cca_held_out, pwcca, r2_cca, r2_svcca, svcca
from tests.references import measures as reference
from tests.rows import CASES, grid, paired, rows_of

Measure = Callable[..., Tensor]
Reference = Callable[..., float]
ENOUGH = [case for case in CASES if case not in ("few", "barely")]
MEASURES = [
    (cca, reference.mean_cca),
    (partial(svcca, share=0.9), partial(reference.mean_cca, share=0.9)),
    (svcca, partial(reference.mean_cca, share=0.99)),
    (r2_cca, reference.r2_cca),
    (partial(r2_svcca, share=0.9), partial(reference.r2_cca, share=0.9)),
    (pwcca, partial(reference.pwcca, share=0.99)),
    (partial(pwcca, share=1.0), reference.pwcca),
]


def rotation(d: int, seed: int) -> Tensor:
    return torch.linalg.qr(paired(d, d, d, seed)[0][0])[0]


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]


@pytest.mark.parametrize(("measure", "expected"), MEASURES)
@pytest.mark.parametrize("case", ENOUGH)
def test_they_are_their_definitions(measure: Measure, expected: Reference, case: str) -> None:
    x, y = rows_of(case)
    torch.testing.assert_close(measure(x, y), grid(expected, x, y), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(measure(y, x), grid(expected, y, x), rtol=1e-8, atol=1e-8)
    if "far" not in case:  # float32 cannot hold such rows
        torch.testing.assert_close(measure(x.float(), y.float()), grid(expected, x, y), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["few", "barely"])
def test_where_rows_are_few_some_components_still_have_correlations(case: str) -> None:
    x, y = rows_of(case)
    share = 0.6
    expected = partial(reference.mean_cca, share=share), partial(reference.pwcca, share=share)
    for measure, definition in zip((svcca, pwcca), expected, strict=True):
        torch.testing.assert_close(measure(x, y, share=share), grid(definition, x, y), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", ENOUGH)
@pytest.mark.parametrize("share", [0.9, 1.0])
def test_held_out_they_are_the_correlations_of_the_fitted_directions(case: str, share: float) -> None:
    (x, x_new), (y, y_new) = (halves(rows) for rows in rows_of(case))
    moments = grid_moments(x, y), grid_moments(x_new, y_new)

    def mean(*rows: np.ndarray) -> float:
        return float(reference.held_out_correlations(*rows, share)[0].mean())

    def weighted(*rows: np.ndarray) -> float:
        rho, alpha = reference.held_out_correlations(*rows, share)
        return float(rho @ alpha / alpha.sum())

    shared = [SharedMoments(each) for each in moments]
    plain = cca_held_out(*moments) if share == 1 else shared[0].correlations("SVCCA", share, shared[1]).mean()
    torch.testing.assert_close(plain, grid(mean, x, y, x_new, y_new), rtol=1e-8, atol=1e-8)
    found = shared[0].correlations("PWCCA", share, shared[1]).weighted()
    torch.testing.assert_close(found, grid(weighted, x, y, x_new, y_new), rtol=1e-8, atol=1e-8)


def test_on_the_fitting_rows_the_held_out_forms_are_the_measures() -> None:
    x, y = rows_of("deficient")
    m = grid_moments(x, y)
    torch.testing.assert_close(cca_held_out(m, m), cca(x, y), rtol=1e-10, atol=1e-10)
    found = SharedMoments(m).correlations("SVCCA", 0.99, SharedMoments(m))
    torch.testing.assert_close(found.mean(), svcca(x, y), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.weighted(), pwcca(x, y), rtol=1e-10, atol=1e-10)


def test_of_unrelated_rows_the_held_out_value_is_zero_and_the_other_is_not() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 10, 200, 16, generator=draw, dtype=torch.float64)
    assert cca(x, y).mean() > 0.2
    found = cca_held_out(*(grid_moments(*halves_) for halves_ in zip(halves(x), halves(y), strict=True)))
    assert abs(float(found.mean())) < 0.01
    assert (found < 0).any()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99))
def test_cca_bears_any_invertible_map(seed: int) -> None:
    x, y = paired(60, seed=seed)
    stretch = rotation(6, seed) * torch.logspace(-1.5, 1.5, 6, dtype=torch.float64)  # moments square the condition
    torch.testing.assert_close(cca(x @ stretch @ rotation(6, seed + 1) + 5, y), cca(x, y), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(cca(y, x).T, cca(x, y), rtol=1e-10, atol=1e-10)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), factor=st.floats(1e-3, 1e3))
def test_svcca_bears_rotations_and_a_factor(seed: int, factor: float) -> None:
    x, y = paired(60, seed=seed)
    turned = factor * x @ rotation(6, seed + 1) + 5
    torch.testing.assert_close(svcca(turned, y, share=0.9), svcca(x, y, share=0.9), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(svcca(y, x).T, svcca(x, y), rtol=1e-10, atol=1e-10)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), factor=st.floats(1e-3, 1e3), order=st.permutations(range(6)))
def test_pwcca_bears_rotations_of_y_and_permutations_of_x(seed: int, factor: float, order: list[int]) -> None:
    x, y = paired(60, seed=seed)
    signs = torch.tensor([1, -1, 1, -1, 1, 1])
    moved = factor * (x[..., order] * signs) + 3
    torch.testing.assert_close(pwcca(moved, y @ rotation(5, seed)), pwcca(x, y), rtol=1e-8, atol=1e-8)


def test_pwcca_weighs_by_x_and_so_is_not_symmetric() -> None:
    x, y = paired(60)
    assert ((pwcca(x, y) - pwcca(y, x).T).abs() > 1e-3).all()


@pytest.mark.parametrize("measure", [cca, svcca, pwcca])
@pytest.mark.parametrize("case", [case for case in ENOUGH if "far" not in case])
def test_of_a_model_with_itself_they_are_one(measure: Measure, case: str) -> None:
    x, _ = rows_of(case)
    torch.testing.assert_close(measure(x, x).diagonal(), torch.ones(3).double(), rtol=0, atol=1e-12)


def test_rows_by_which_every_correlation_is_one_are_refused() -> None:
    x, y = paired(7)
    with pytest.raises(
        ValueError, match=r"hold 7 for 6 and 5: 5 correlations would be 1.*at least 12 rows.*lower `share`"
    ):
        cca(x, y)
    x, y = paired(4)
    with pytest.raises(ValueError, match="hold 4 for 3 and 3: 3 correlations"):
        pwcca(x, y)


def test_constant_features_are_refused_where_each_is_normalised() -> None:
    x, y = paired(30)
    y[1, :, 2] = 1.1
    with pytest.raises(ValueError, match=r"`y` has 1 constant ones in layers \[1\]"):
        cca(x, y)
    assert svcca(x, y).isfinite().all()
    with pytest.raises(ValueError, match=r"`x` has only constant features in layers \[0, 1, 2\]"):
        svcca(torch.full_like(x, 0.3), y)


def test_a_share_outside_its_range_is_refused() -> None:
    x, y = paired(30)
    for share in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="`share` to be above 0 and at most 1"):
            svcca(x, y, share=share)


def test_held_out_rows_on_which_nothing_varies_are_refused() -> None:
    x, y = paired(30)
    fitted = grid_moments(x, y)
    with pytest.raises(ValueError, match="are constant on its 5 rows"):
        cca_held_out(fitted, grid_moments(x[:, :1].expand(-1, 5, -1), y[:, :5]))
    with pytest.raises(ValueError, match="Held-out CCA expects at least 3 rows"):
        cca_held_out(fitted, grid_moments(x[:, :2], y[:, :2]))
    with pytest.raises(ValueError, match="layers and widths that `fitted` has"):
        cca_held_out(fitted, grid_moments(y, x))
