from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rows import CASES, paired, rows_of
from tests.runs import related_rows

from aligners.injection.scoring.scores import UnitMeans
from aligners.similarity.algebra.grid import GridSums, grid_moments
from aligners.similarity.algebra.moments import GridMoments, Moments, MomentsMetric, constant_features, moments_of
from aligners.similarity.functional.cka import linear_cka
from aligners.similarity.passes.one_pass import FeatureScales

ROWS = 60


def close(a: Moments | GridMoments, b: Moments | GridMoments, rtol: float = 1e-10) -> None:
    for name, expected in b._asdict().items():
        torch.testing.assert_close(
            getattr(a, name), expected, rtol=rtol, atol=rtol * float(expected.abs().max()), msg=name
        )


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


@settings(max_examples=20, deadline=None)
@given(cuts=st.sets(st.integers(1, ROWS - 1), max_size=8), offset=st.sampled_from([0.0, 1e3]), seed=st.integers(0, 5))
def test_any_split_into_batches_gives_the_whole(cuts: set[int], offset: float, seed: int) -> None:
    x, y = related_rows(2, ROWS, 5, 3, seed)
    x, y = x + offset, y - offset
    metric = MomentsMetric(2, 5, 3)
    for start, end in pairwise([0, *sorted(cuts), ROWS]):
        metric.update(x[:, start:end], y[:, start:end])
    close(metric.compute(), moments_of(x, y))
    close(metric.compute().swap(), moments_of(y, x))


def test_half_precision_leaves_sums_alone_and_one_mean_keeps_its_shape() -> None:
    module = torch.nn.ModuleList([UnitMeans(1)])
    module[0].update(torch.full((1, 3), 1 / 3))
    found = module.half().to(torch.float16)[0].compute()
    assert (found.shape, found.dtype) == ((1,), torch.float64)
    assert found.item() == torch.tensor(1 / 3).item()


def numpy_grid(x: torch.Tensor, y: torch.Tensor) -> GridMoments:
    """By the definitions, row by row and pair by pair."""
    rows_x, rows_y = (np.asarray(rows - rows.mean(1, keepdim=True)) for rows in (x, y))

    def sums(term: Callable[[np.ndarray, np.ndarray], np.ndarray | float], *models: np.ndarray) -> torch.Tensor:
        grid = [[sum(term(*pair) for pair in zip(a, b, strict=True)) for b in models[1]] for a in models[0]]
        return torch.tensor(np.array(grid), dtype=torch.float64)

    def quartic(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ a * (b @ b))

    return GridMoments(
        torch.tensor(float(x.shape[1]), dtype=torch.float64),
        x.mean(1),
        y.mean(1),
        torch.stack([sums(np.outer, layer[None], layer[None])[0, 0] for layer in rows_x]),
        torch.stack([sums(np.outer, layer[None], layer[None])[0, 0] for layer in rows_y]),
        sums(np.outer, rows_x, rows_y),
        sums(quartic, rows_x, rows_x).diagonal(),
        sums(quartic, rows_y, rows_y).diagonal(),
        sums(quartic, rows_x, rows_y),
    )


@pytest.mark.parametrize("case", CASES)
def test_those_of_the_grid_are_what_numpy_says(case: str) -> None:
    x, y = rows_of(case)
    found = grid_moments(x, y)
    close(found, numpy_grid(x, y), 1e-8 if "far" in case else 1e-10)
    close(grid_moments(x.float(), y.float()), numpy_grid(x.float().double(), y.float().double()), 1e-8)
    close(found.swap(), grid_moments(y, x))


@settings(max_examples=15, deadline=None)
@given(cuts=st.sets(st.integers(0, ROWS), max_size=8), offset=st.sampled_from([0.0, 1e3]), seed=st.integers(0, 5))
def test_sums_in_place_over_any_batches_give_the_whole(cuts: set[int], offset: float, seed: int) -> None:
    x, y = paired(ROWS, seed=seed)
    x, y = x + offset, y - offset
    sums, backwards, none = (GridSums.zeros(3, 6, 2, 5) for _ in range(3))
    batches = list(pairwise([0, *sorted(cuts), ROWS]))  # some of them without rows
    for these, order in ((sums, batches), (backwards, batches[::-1])):
        for start, end in order:
            these.add_(x[:, start:end], y[:, start:end])
        close(these.moments(), grid_moments(x, y), 1e-9)
    twice = torch.cat([x, x], 1), torch.cat([y, y], 1)
    close((none + sums + backwards).moments(), grid_moments(*twice), 1e-9)  # about another shift


def test_a_batch_allocates_nothing_of_the_grids_size() -> None:
    x, y = torch.randn(6, 8, 40), torch.randn(6, 8, 40)
    sums = GridSums.zeros(6, 40, 6, 40).add_(x, y)
    with torch.profiler.profile(profile_memory=True) as profile:
        sums.add_(x, y)
    assert max(event.cpu_memory_usage for event in profile.events()) < sums.cross.xy.nbytes / 10


def test_rows_that_are_no_pairs_are_refused() -> None:
    x, y = paired(ROWS)
    for rows, says in (
        ((x[0], y), r"`x` as floating-point states .* shape \(60, 6\)"),
        ((x, y.long()), r"`y` as floating-point states .* but got torch.int64"),
        ((x[:, 1:], y), "the same rows, at least one, but got 59 and 60"),
        ((x[:, :0], y[:, :0]), "at least one, but got 0 and 0"),
    ):
        with pytest.raises(ValueError, match=says):
            grid_moments(*rows)
    y[1, 3, 2] = torch.nan
    with pytest.raises(ValueError, match=r"`y` holds NaN or infinite values in layers \[1\]"):
        grid_moments(x, y)
    with pytest.raises(ValueError, match=r"`y` had NaN or infinite values in layers \[1\]"):
        linear_cka(GridSums.zeros(3, 6, 2, 5).add_(x, y).moments())


def test_a_pair_of_layers_is_what_its_rows_alone_give() -> None:
    x, y = paired(ROWS)
    close(GridSums.zeros(3, 6, 2, 5).add_(x, y).pair(2, 1).moments(), grid_moments(x[2:], y[1:]))


def test_products_in_single_precision_keep_six_digits() -> None:
    x, y = paired(400)
    exact, fast = GridSums.zeros(3, 6, 2, 5), GridSums.zeros(3, 6, 2, 5)
    for rows in ((x[:, :150] + 1000, y[:, :150]), (x[:, 150:] + 1000, y[:, 150:])):
        exact.add_(*rows)
        fast.add_(*rows, torch.float32)
    (a, b), scale = (exact.moments(), fast.moments()), grid_moments(x, y)
    assert torch.equal(a.xx, b.xx)
    norms = [scatter.diagonal(dim1=-2, dim2=-1).sqrt() for scatter in (scale.xx, scale.yy)]
    error = (a.xy - b.xy).abs() / (norms[0][:, None, :, None] * norms[1][None, :, None])
    assert 0 < error.max() < 1e-6


# ---------------------------------------------------------------------- constants and scales


def test_what_rounding_leaves_of_a_constant_is_constant() -> None:
    mean = torch.tensor([[5.0, 5.0, 5.0, 0.0, 0.0, -5.0]], dtype=torch.float64)
    deviation = torch.tensor([[0.0, 1e-9, 1e-5, 0.0, 1e-30, -1e-9]], dtype=torch.float64) * 5
    assert constant_features(deviation**2, mean).tolist() == [[True, True, False, True, False, True]]


def test_features_are_scaled_by_mean_and_deviation_and_constants_stay() -> None:
    rows = torch.randn(2, 50, 3, generator=torch.Generator().manual_seed(0)).double() + 1000
    rows[1, :, 2] = 0.1
    scales = FeatureScales(2, 3)
    for part in rows.float().split([7, 43], 1):
        scales.update(part)
    mean, deviation = scales.compute()
    torch.testing.assert_close(mean, rows.float().double().mean(1), rtol=1e-12, atol=0)
    assert deviation[1, 2] == 1
    expected = rows.float().double().std(1, correction=0)
    expected[1, 2] = 1
    torch.testing.assert_close(deviation, expected, rtol=1e-8, atol=0)
