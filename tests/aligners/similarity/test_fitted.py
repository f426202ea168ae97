"""CCA, SVCCA, PWCCA, regression and neurons: measures from moments beside their definitions, and on held-out rows."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aligners.similarity.algebra.grid import GridSums, grid_moments
from aligners.similarity.catalogue import catalogue
from aligners.similarity.functional.cca import SharedMoments, cca, cca_held_out, pwcca, r2_cca, r2_svcca, svcca
from aligners.similarity.functional.cka import linear_cka, unbiased_cka
from aligners.similarity.functional.regression import mixedsim, mixedsim_held_out, neuronsim, r2, r2_held_out
from tests.references import measures as reference
from tests.rows import CASES, grid, paired, rows_of

Measure = Callable[..., Tensor]
Reference = Callable[..., float]
ENOUGH = [case for case in CASES if case not in ("few", "barely")]
MEASURES: dict[str, tuple[Measure, Reference, list[str]]] = {
    "cca": (cca, reference.mean_cca, ENOUGH),
    "svcca": (svcca, partial(reference.mean_cca, share=0.99), ENOUGH),
    "svcca .9": (partial(svcca, share=0.9), partial(reference.mean_cca, share=0.9), ENOUGH),
    "svcca .6": (partial(svcca, share=0.6), partial(reference.mean_cca, share=0.6), ["few", "barely"]),
    "r2_cca": (r2_cca, reference.r2_cca, ENOUGH),
    "r2_svcca .9": (partial(r2_svcca, share=0.9), partial(reference.r2_cca, share=0.9), ENOUGH),
    "pwcca": (pwcca, partial(reference.pwcca, share=0.99), ENOUGH),
    "pwcca 1": (partial(pwcca, share=1.0), reference.pwcca, ENOUGH),
    "pwcca .6": (partial(pwcca, share=0.6), partial(reference.pwcca, share=0.6), ["few", "barely"]),
    "r2": (r2, reference.r2, [*ENOUGH, "barely"]),
    "mixedsim": (mixedsim, reference.mixedsim, [*ENOUGH, "barely"]),
    "neuronsim": (neuronsim, reference.neuronsim, list(CASES)),
}
HELD_OUT = [(r2_held_out, reference.r2_held_out), (mixedsim_held_out, reference.mixedsim_held_out)]


def rotation(d: int, seed: int) -> Tensor:
    return torch.linalg.qr(paired(d, d, d, seed)[0][0])[0]


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-8) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, (*_, cases) in MEASURES.items() for case in cases])
def test_they_are_their_definitions(name: str, case: str) -> None:
    measure, definition, _ = MEASURES[name]
    x, y = rows_of(case)
    expected = grid(definition, x, y)
    close(measure(x, y), expected)
    if (name, case) not in (("r2", "barely"), ("mixedsim", "barely")):  # X has too few rows to regress on there
        close(measure(y, x), grid(definition, y, x))
    if "far" not in case:  # float32 cannot hold such rows
        close(measure(x.float(), y.float()), expected, 1e-4)
        if case in ENOUGH and not name.startswith("r2_"):
            close(measure(x, x).diagonal(), torch.ones(3).double(), 1e-12)


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

    found = SharedMoments(moments[0]).correlations("SVCCA", share, SharedMoments(moments[1]))
    close(cca_held_out(*moments) if share == 1 else found.mean(), grid(mean, x, y, x_new, y_new))
    close(found.weighted(), grid(weighted, x, y, x_new, y_new))


@pytest.mark.parametrize(("measure", "expected"), HELD_OUT)
@pytest.mark.parametrize("case", ENOUGH)
def test_held_out_they_are_the_fitted_regression_on_new_rows(measure: Measure, expected: Reference, case: str) -> None:
    (x, x_new), (y, y_new) = (halves(rows) for rows in rows_of(case))
    rows = x, y, x_new + 0.1 * x.std(1, keepdim=True), y_new
    close(measure(grid_moments(*rows[:2]), grid_moments(*rows[2:])), grid(expected, *rows))


def test_on_the_fitting_rows_the_held_out_forms_are_the_measures() -> None:
    m = grid_moments(*rows_of("deficient"))
    shared = SharedMoments(m).correlations("SVCCA", 0.99, SharedMoments(m))
    for found, expected in (
        (cca_held_out(m, m), cca(m)),
        (shared.mean(), svcca(m)),
        (shared.weighted(), pwcca(m)),
        (r2_held_out(m, m), r2(m)),
        (mixedsim_held_out(m, m), mixedsim(m)),
    ):
        close(found, expected, 1e-10)


def test_of_unrelated_rows_held_out_values_are_not_positive_and_others_are() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 10, 200, 16, generator=draw, dtype=torch.float64)
    fitted, held_out = (grid_moments(*rows) for rows in zip(halves(x), halves(y), strict=True))
    for measure, unbiased, least in ((cca, cca_held_out, 0.2), (mixedsim, mixedsim_held_out, 0.3)):
        assert abs(float(unbiased(fitted, held_out).mean())) < 0.01 < least < measure(fitted).mean()
        assert (unbiased(fitted, held_out) < 0).any()
    assert r2(fitted).mean() > 0.1
    assert (r2_held_out(fitted, held_out) < 0).all()


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 99), factor=st.floats(1e-3, 1e3), order=st.permutations(range(6)))
def test_what_they_bear(seed: int, factor: float, order: list[int]) -> None:
    x, y = paired(60, seed=seed)
    turn_x, turn_y = rotation(6, seed + 1), rotation(5, seed)
    stretched = x @ (rotation(6, seed) * torch.logspace(-1.5, 1.5, 6, dtype=torch.float64)) @ turn_x + 5
    stretched_y = y @ (turn_y * torch.logspace(-2, 2, 5, dtype=torch.float64)) - 7
    turned = factor * x @ turn_x + 5
    signed = factor * (x[..., order] * torch.tensor([1, -1, 1, -1, 1, 1])) + 3
    scaled = x[..., order] * torch.tensor([factor, -1, 1, -5, 0.1, 1], dtype=torch.float64) + 3
    nine = partial(svcca, share=0.9)
    for measure, moved_x, moved_y in (
        (cca, stretched, y),  # any invertible map
        (nine, turned, y),  # rotations and a factor
        (pwcca, signed, y @ turn_y),  # rotations of Y, permutations and signs of X
        (r2, turned, stretched_y),
        (mixedsim, scaled, stretched_y),
        (neuronsim, scaled, y),
    ):
        close(measure(moved_x, moved_y), measure(x, y))  # type: ignore[operator]
    close(neuronsim(y, scaled), neuronsim(y, x))
    for symmetric in (cca, svcca):
        close(symmetric(y, x).T, symmetric(x, y), 1e-10)
    for of_neurons in (mixedsim, neuronsim):
        assert ((of_neurons(x @ turn_x, y) - of_neurons(x, y)).abs() > 1e-6).all()


def test_pwcca_weighs_by_x_and_so_is_not_symmetric() -> None:
    x, y = paired(60)
    assert ((pwcca(x, y) - pwcca(y, x).T).abs() > 1e-3).all()


def test_refusals() -> None:
    x, y = paired(30)
    flat, one_constant, constants = y.clone(), x.clone(), x.clone()
    flat[1, :, 2], one_constant[0, :, 1], constants[:2, :, 3:] = 1.1, 0.1, 1 / 3
    for measure, rows, says in (
        (cca, (x[:, :7], y[:, :7]), r"hold 7 for 6 and 5: 5 correlations would be 1.*at least 12 rows.*lower `share`"),
        (pwcca, (x[:, :4], y[:, :4]), "hold 4 for 3 and 3: 3 correlations"),
        (r2, (x[:, :6], y[:, :6]), "at least 7 for the 5 features of `y`, but `moments` hold 6"),
        (mixedsim, (x[:, :6], y[:, :6]), "at least 7 for the 5 features of `y`, but `moments` hold 6"),
        (neuronsim, (x[:, :2], y[:, :2]), "at least 3 rows, but `moments` hold 2"),
        (cca, (x, flat), r"`y` has 1 constant ones in layers \[1\]"),
        (r2, (y, one_constant), "`y` has 1 constant ones"),
        (mixedsim, (y, one_constant), "`y` has 1 constant ones"),
        (mixedsim, (one_constant, y), r"Mixed similarity, but `x` has 1 constant ones in layers \[0\]"),
        (neuronsim, (constants, y), r"`x` has 6 constant ones in layers \[0, 1\]"),
        (svcca, (torch.full_like(x, 0.3), y), r"`x` has only constant features in layers \[0, 1, 2\]"),
        *((partial(svcca, share=share), (x, y), "`share` to be above 0 and at most 1") for share in (0, 1.5, np.nan)),
    ):
        with pytest.raises(ValueError, match=says):
            measure(*rows)  # type: ignore[operator]
    assert svcca(x, flat).isfinite().all()
    assert r2(one_constant, y).isfinite().all()


def test_held_out_rows_that_say_nothing_are_refused() -> None:
    x, y = paired(30)
    fitted, two = grid_moments(x, y), grid_moments(x[:, :2], y[:, :2])
    still_x, still_y = (rows[:, :1].expand(-1, 5, -1) for rows in (x, y))
    for measure, held_out, says in (
        (cca_held_out, grid_moments(still_x, y[:, :5]), "are constant on its 5 rows"),
        (cca_held_out, two, "Held-out CCA expects at least 3 rows"),
        (mixedsim_held_out, grid_moments(x[:, :5], still_y), "predictions that vary on the rows of `held_out`"),
        (mixedsim_held_out, grid_moments(still_x, y[:, :5]), "Held-out mixed similarity, but `x` has 18 constant ones"),
    ):
        with pytest.raises(ValueError, match=says):
            measure(fitted, held_out)  # type: ignore[operator]
    with pytest.raises(ValueError, match="differ from the mean of `fitted`"):
        r2_held_out(fitted._replace(mean_x=x[:, 0]), grid_moments(x[:, :1], y[:, :1]))


# ---------------------------------------------------------------------- the catalogue

SHARE = 0.5
FUNCTIONS = {
    "cca": cca,
    "svcca": partial(svcca, share=SHARE),
    "r2_cca": r2_cca,
    "r2_svcca": partial(r2_svcca, share=SHARE),
    "pwcca": partial(pwcca, share=SHARE),
    "cka": linear_cka,
    "unbiased_cka": unbiased_cka,
    "r2": r2,
    "mixedsim": mixedsim,
    "neuronsim": neuronsim,
}


def accumulated(x: Tensor, y: Tensor) -> SharedMoments:
    """What three batches of rows leave behind."""
    sums = GridSums.zeros(3, 6, 2, 5)
    for rows in zip(x.split(25, 1), y.split(25, 1), strict=True):
        sums.add_(*rows)
    return SharedMoments(sums.moments())


def test_over_batches_each_measure_on_moments_is_its_function_of_all_rows() -> None:
    x, y = paired(60)
    assert {name for name, measure in catalogue().items() if measure.family == "moments"} == set(FUNCTIONS)
    for name, function in FUNCTIONS.items():
        close(catalogue(SHARE)[name].compute(accumulated(x + 1000, y)), function(x + 1000, y), 1e-9)


@pytest.mark.parametrize("name", ["svcca", "pwcca"])
def test_the_share_reaches_the_measure_and_is_checked(name: str) -> None:
    moments = accumulated(*paired(60))
    assert not torch.allclose(catalogue(SHARE)[name].compute(moments), catalogue()[name].compute(moments))
    with pytest.raises(ValueError, match=r"Expected `share` to be above 0 and at most 1, but got 99"):
        catalogue(99)[name].compute(moments)
