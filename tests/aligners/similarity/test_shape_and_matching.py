"""Shape, matching, predictivity and RSA of ranks against matrix roots, tried permutations, regressions and SciPy."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.references import shapes as reference
from tests.rows import TEN, data_set, grid, paired
from torch import Tensor

from aligners.similarity.algebra.grid import GridSums
from aligners.similarity.functional import kernels, matching
from aligners.similarity.functional.kernels import rsa, rsa_spearman
from aligners.similarity.functional.matching import hard_matching, soft_matching
from aligners.similarity.functional.predictivity import fold_of, linear_predictivity
from aligners.similarity.functional.shape import angular_shape, angular_shape_distance, nbs, procrustes_distance

OF_MOMENTS: dict[str, Callable[..., Tensor]] = {
    "nbs": nbs,
    "angular_shape": angular_shape,
    "angular_shape_distance": angular_shape_distance,
    "procrustes_distance": procrustes_distance,
    "hard_matching": hard_matching,
    "soft_matching": soft_matching,
}
MEASURES = {
    **OF_MOMENTS,
    "linear_predictivity": linear_predictivity,
    "rsa_spearman": rsa_spearman,
    "rsa_centred": partial(rsa, kernel="centred_cosine"),
}


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("case", TEN)
def test_they_are_what_the_definitions_say(name: str, case: str) -> None:
    x, y = data_set(case)
    if name.endswith("matching"):  # every permutation is tried
        x, y = x[..., :6], y[..., :5]
    expected = grid(getattr(reference, name), x, y)
    found = MEASURES[name](x, y)
    close = 1e-6 if name in ("nbs", "angular_shape", "angular_shape_distance", "procrustes_distance") else 1e-8
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=close)


@pytest.mark.parametrize("name", OF_MOMENTS)
def test_any_split_of_the_rows_gives_the_same(name: str) -> None:
    x, y = paired(60)
    sums = GridSums.zeros(3, 6, 2, 5)
    for some in (slice(0, 7), slice(7, 8), slice(8, 60)):
        sums.add_(x[:, some], y[:, some])
    torch.testing.assert_close(OF_MOMENTS[name](sums.moments()), OF_MOMENTS[name](x, y), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", MEASURES)
def test_invariances(name: str) -> None:
    measure, (x, y) = MEASURES[name], paired(60, seed=4)
    draw = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(6, 6, generator=draw, dtype=torch.float64)).Q
    scales = torch.linspace(0.1, 4, 6, dtype=torch.float64)
    value = measure(x, y)
    matched = name.endswith("matching")
    changed = (x * scales + 3).flip(-1) if matched else 3 * x @ turn
    if name != "rsa_spearman":
        changed = changed + 5
    torch.testing.assert_close(measure(changed, y), value, rtol=0, atol=1e-9)
    moved = x @ turn if matched else x * scales
    assert (measure(moved, y) - value).abs().max() > 1e-3
    if name != "linear_predictivity":
        torch.testing.assert_close(measure(y, x).mT, value, rtol=0, atol=1e-9)
    of_itself = 0.0 if name.endswith("distance") else 1.0
    torch.testing.assert_close(measure(x, x).diag(), torch.full((3,), of_itself).double(), rtol=0, atol=1e-6)


def test_what_follows_from_the_nuclear_norm() -> None:
    x, y = paired(60)
    similarity = nbs(x, y)
    torch.testing.assert_close(angular_shape_distance(x, y).cos(), similarity)
    torch.testing.assert_close(procrustes_distance(x, y), (2 - 2 * similarity).sqrt())
    torch.testing.assert_close(angular_shape(x, y), 1 - angular_shape_distance(x, y) * 2 / math.pi)
    unscaled = grid(partial(reference.procrustes_distance, scaled=False), x, y)
    torch.testing.assert_close(procrustes_distance(x, y, scaled=False), unscaled)
    a, b, c = (rows[0:1] for rows in (x, paired(60, seed=1)[0], paired(60, seed=2)[0]))
    for distance in (angular_shape_distance, procrustes_distance):
        assert distance(a, c) <= distance(a, b) + distance(b, c)


def test_at_equal_widths_the_soft_matching_is_the_hard_one() -> None:
    x, y = paired(60, 6, 6)
    torch.testing.assert_close(soft_matching(x, y), hard_matching(x, y))
    torch.testing.assert_close(hard_matching(x, x.flip(-1)).diag(), torch.ones(3).double())
    assert (soft_matching(x, -x).diag() < 0.99).all()


def test_a_programme_gives_what_the_copies_give(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = paired(60)
    value = soft_matching(x, y)
    monkeypatch.setattr(matching, "MOST_COPIES", 29)
    torch.testing.assert_close(soft_matching(x, y), value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_folds_are_whole_texts(ridge: float) -> None:
    x, y = paired(61)
    text = torch.arange(61) * 7 % 13
    expected = grid(partial(reference.linear_predictivity, groups=text.numpy(), folds=4, ridge=ridge), x, y)
    found = linear_predictivity(x, y, text, 4, ridge)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert (found - linear_predictivity(x, y, None, 4, ridge)).abs().max() > 1e-3
    folds = fold_of(text, 61, 4)
    assert all(len(folds[text == name].unique()) == 1 for name in range(13))


def test_repeated_rows_predict_each_other_unless_they_are_kept_together() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1, 40, 8, generator=draw, dtype=torch.float64).repeat(1, 5, 1) for _ in "xy")
    text = torch.arange(200) % 40
    assert linear_predictivity(x, y) > 0
    assert linear_predictivity(x, y, text) < 0


@pytest.mark.parametrize("kernel", ["cosine", "centred_cosine", "euclidean"])
def test_counted_ranks_are_nearly_sorted_ones(kernel: kernels.RankedKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data_set("duplicates")
    value = rsa_spearman(x, y, kernel)
    torch.testing.assert_close(value, grid(partial(reference.rsa_spearman, kernel=kernel), x, y), rtol=0, atol=1e-8)
    monkeypatch.setattr(kernels, "MOST_SORTED", 0)
    torch.testing.assert_close(rsa_spearman(x, y, kernel), value, rtol=0, atol=1e-5)
    monkeypatch.setattr("aligners.similarity.algebra.pairs.BLOCK", 13)
    torch.testing.assert_close(rsa_spearman(x, y, kernel), value, rtol=0, atol=1e-5)


def test_refusals() -> None:
    x, y = paired(20)
    constant, flat = x.clone(), y.clone()
    constant[1] = 2
    flat[0, :, 3] = 1
    for measure, given, says in (
        (nbs, (constant, y), r"states that vary.*layers \[1\]"),
        (procrustes_distance, (x[:, :1], y[:, :1]), "at least 2 rows"),
        (hard_matching, (x, flat), r"features that vary.*layers \[0\]"),
        (soft_matching, (x[:, :2], y[:, :2]), "at least 3 rows"),
        (linear_predictivity, (x, y, torch.arange(20) // 10), "as many groups of rows as `folds`, but got 2 and 5"),
        (linear_predictivity, (x, y, None, 1), "`folds` to be at least 2"),
        (linear_predictivity, (x, y, None, 5, -1), "`ridge`"),
        (linear_predictivity, (constant * 0, y), "layer of `x` is constant"),
        (rsa_spearman, (x, y, "linear"), "`kernel` to be one of cosine, centred_cosine, euclidean|`kernel` out of"),
        (rsa_spearman, (constant, y), r"similarities to one another differ.*layers \[1\]"),
        (rsa_spearman, (x * float("nan"), y), "finite"),
    ):
        with pytest.raises(ValueError, match=says):
            measure(*given)  # type: ignore[operator]
