from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aligners.similarity.algebra import pairs
from aligners.similarity.functional.kernels import Kernel, rbf_cka, rsa
from tests.references import kernels as reference
from tests.runs import related_rows

D_X, D_Y = 6, 4
KERNELS = get_args(Kernel)


def grid(n: int, d_x: int = D_X, d_y: int = D_Y, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of three layers of X and two of Y, of standard deviation 1 and a mean not far from it."""
    x, y = (rows / rows.std() for rows in related_rows(3, n, d_x, d_y, seed))
    return x, y[:2]


def rotation(d: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).Q


def expected_rsa(x: Tensor, y: Tensor, kernel: str) -> Tensor:
    return torch.tensor([[reference.rsa(a.numpy(), b.numpy(), kernel) for b in y] for a in x], dtype=torch.float64)


def expected_rbf(x: Tensor, y: Tensor, width: float, unbiased: bool) -> Tensor:
    return torch.tensor(
        [[reference.rbf_cka(a.numpy(), b.numpy(), width, unbiased) for b in y] for a in x], dtype=torch.float64
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n", [3, 5, D_X + 1, 90, 300])
def test_rsa_is_what_the_definition_says(kernel: Kernel, n: int) -> None:
    x, y = grid(n)
    torch.testing.assert_close(rsa(x, y, kernel), expected_rsa(x, y, kernel), rtol=0, atol=1e-8)
    found = rsa(x.float(), y.float(), kernel)
    torch.testing.assert_close(found, expected_rsa(x.float().double(), y.float().double(), kernel), rtol=0, atol=1e-8)
    torch.testing.assert_close(found, expected_rsa(x, y, kernel), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
def test_rsa_far_from_the_origin(kernel: Kernel) -> None:
    x, y = grid(80)
    x, y = x + 1000, y - 1000
    torch.testing.assert_close(rsa(x, y, kernel), expected_rsa(x, y, kernel), rtol=0, atol=1e-8)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("n", [4, 5, D_X + 1, 91, 300])
def test_rbf_cka_is_what_the_definition_says(unbiased: bool, n: int) -> None:
    x, y = grid(n)
    for offset in (0, 1000):
        found = rbf_cka(x + offset, y - offset, 0.7, unbiased)
        torch.testing.assert_close(found, expected_rbf(x, y, 0.7, unbiased), rtol=0, atol=1e-8)
    torch.testing.assert_close(
        rbf_cka(x.float(), y.float(), 0.7, unbiased), expected_rbf(x, y, 0.7, unbiased), rtol=0, atol=1e-4
    )


def test_rank_deficient_and_badly_scaled_rows() -> None:
    x, y = grid(80)
    x[:, :, 3:] = x[:, :, :3] @ rotation(3)
    x[:, :, 0] *= 1e6
    for kernel in KERNELS:
        torch.testing.assert_close(rsa(x, y, kernel), expected_rsa(x, y, kernel), rtol=0, atol=1e-8)
    torch.testing.assert_close(rbf_cka(x, y), expected_rbf(x, y, 0.5, False), rtol=0, atol=1e-8)


def test_rows_that_are_repeated() -> None:
    x, y = grid(80)
    x = 1000 * x[:, torch.arange(80) // 2]
    torch.testing.assert_close(rsa(x, y, "euclidean"), expected_rsa(x, y, "euclidean"), rtol=0, atol=1e-8)
    torch.testing.assert_close(rbf_cka(x, y), expected_rbf(x, y, 0.5, False), rtol=0, atol=1e-8)


@pytest.mark.parametrize("kernel", ["cosine", "linear"])
def test_rsa_is_the_same_by_both_routes(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = grid(300)
    found = []
    for route in (pairs.gram_pair_sums, pairs.feature_pair_sums):
        monkeypatch.setattr("aligners.similarity.functional.kernels.linear_pair_sums", route)
        found.append(rsa(x, y, kernel))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_without_a_bias_the_mean_over_independent_rows_is_zero() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(layers, 24, 30, generator=draw, dtype=torch.float64) for layers in (200, 1))
    unbiased = rbf_cka(x, y, unbiased=True)
    assert abs(unbiased.mean()) < 3 * unbiased.std() / 200**0.5
    assert rbf_cka(x, y).mean() > 0.5


def test_a_layer_with_itself_is_one() -> None:
    x, _ = grid(50)
    found = [rsa(x, x, kernel) for kernel in KERNELS] + [rbf_cka(x, x), rbf_cka(x, x, unbiased=True)]
    for value in found:
        torch.testing.assert_close(value.diag(), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 100), scale=st.floats(1e-3, 1e3), shift=st.floats(-100, 100))
def test_invariances(seed: int, scale: float, shift: float) -> None:
    x, y = grid(30, seed=seed)
    turned = scale * x @ rotation(D_X, seed)
    moved = turned + shift * scale
    for kernel in KERNELS:
        torch.testing.assert_close(rsa(turned, y, kernel), rsa(x, y, kernel), rtol=0, atol=1e-9)
        torch.testing.assert_close(rsa(y, x, kernel), rsa(x, y, kernel).mT, rtol=0, atol=1e-12)
    torch.testing.assert_close(rsa(moved, y, "euclidean"), rsa(x, y, "euclidean"), rtol=0, atol=1e-7)
    for unbiased in (False, True):
        torch.testing.assert_close(rbf_cka(moved, y, 0.5, unbiased), rbf_cka(x, y, 0.5, unbiased), rtol=0, atol=1e-7)


def test_the_cosine_sees_the_mean() -> None:
    x, y = grid(30)
    assert (rsa(x - x.mean(1, keepdim=True), y) - rsa(x, y)).abs().min() > 1e-3


def test_the_kernels_differ() -> None:
    x, y = grid(30)
    values = [rsa(x, y, kernel) for kernel in KERNELS] + [rbf_cka(x, y, width) for width in (0.2, 0.8)]
    for place, value in enumerate(values):
        assert all((value - other).abs().max() > 1e-3 for other in values[:place])


def test_refusals() -> None:
    x, y = grid(30)
    with pytest.raises(ValueError, match="`kernel` to be one of cosine, linear, euclidean, but got 'rbf'"):
        rsa(x, y, "rbf")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="RSA expects at least 3 rows"):
        rsa(x[:, :2], y[:, :2])
    with pytest.raises(ValueError, match="RBF CKA expects at least 4 rows"):
        rbf_cka(x[:, :3], y[:, :3])
    with pytest.raises(ValueError, match=r"`width`.*got 0"):
        rbf_cka(x, y, 0)
    with pytest.raises(ValueError, match="finite"):
        rsa(x / 0, y)
    zero = x.clone()
    zero[2, 7] = 0
    with pytest.raises(ValueError, match="rows of `x` that are not zero, but row 7 at layer 2"):
        rsa(zero, y)
    assert rsa(zero, y, "linear").isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("value", [0.1, 1e6 / 3])
def test_similarities_that_are_all_equal_are_refused(kernel: Kernel, value: float) -> None:
    x, y = grid(30)
    y[1] = value
    with pytest.raises(ValueError, match=r"rows of `y` whose similarities .* at layers \[1\]"):
        rsa(x, y, kernel)
    axes = torch.eye(30, dtype=torch.float64)[None]  # every two rows at right angles, at one distance
    with pytest.raises(ValueError, match=r"rows of `y` whose similarities .* at layers \[0\]"):
        rsa(x, 3 * axes, kernel)


def test_collinear_rows_have_no_cosines_to_correlate() -> None:
    x, y = grid(30)
    y[0] = y[0, :1] * torch.linspace(1, 9, 30, dtype=torch.float64)[:, None]
    with pytest.raises(ValueError, match=r"rows of `y` whose similarities .* at layers \[0\]"):
        rsa(x, y)
    assert rsa(x, y, "euclidean").isfinite().all()


def test_constant_features_have_no_median_distance() -> None:
    x, y = grid(30)
    x[1] = 1 / 3
    with pytest.raises(ValueError, match=r"`x` with a median distance above 0, but at layers \[1\]"):
        rbf_cka(x, y)
    y[0, 5:] = y[0, 5]
    with pytest.raises(ValueError, match="most rows are the same row"):
        rbf_cka(x[:1], y)
