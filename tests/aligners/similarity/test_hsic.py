from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aligners.similarity.algebra.pairs import PairSums, centred, feature_pair_sums, gram_pair_sums, linear_pair_sums
from aligners.similarity.functional.cka import HSIC, cka_from_hsic, minibatch_cka, unbiased_hsic
from tests.references import kernels as reference
from tests.runs import related_rows

D_X, D_Y = 6, 4


def grid(n: int, d_x: int = D_X, d_y: int = D_Y, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of three layers of X and two of Y."""
    x, y = related_rows(3, n, d_x, d_y, seed)
    return x, y[:2]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expected_hsic(x: Tensor, y: Tensor) -> Tensor:
    """The reference, one layer pair at a time."""
    grams = [[(rows - rows.mean(0)).numpy() for rows in side] for side in (x, y)]
    return torch.tensor([[reference.hsic_1(a @ a.T, b @ b.T) for b in grams[1]] for a in grams[0]], dtype=torch.float64)


def expected_cka(x: Tensor, y: Tensor, batch: int) -> Tensor:
    return torch.tensor(
        [[reference.minibatch_cka(a.numpy(), b.numpy(), batch) for b in y] for a in x], dtype=torch.float64
    )


def close(a: PairSums | HSIC, b: PairSums | HSIC, rtol: float = 1e-10) -> None:
    for name in a._fields:
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=rtol, atol=1e-8, msg=name)


@pytest.mark.parametrize("n", [4, 7])
def test_it_is_the_mean_over_all_quadruples_of_rows(n: int) -> None:
    x, y = grid(n)
    found = unbiased_hsic(x, y)
    for i, a in enumerate(x.numpy()):
        for j, b in enumerate(y.numpy()):
            expected = reference.hsic_1_by_quadruples(a @ a.T, b @ b.T)
            assert found.xy[i, j].item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n", [4, 5, D_X + 1, 90, 600], ids=lambda n: f"n={n}")
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_it_is_what_the_definition_says(n: int, offset: float) -> None:
    x, y = grid(n)
    found = unbiased_hsic(x / x.std() + offset, y / y.std() - offset)
    x, y = x / x.std(), y / y.std()
    torch.testing.assert_close(found.xy, expected_hsic(x, y), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.xx, expected_hsic(x, x).diag(), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.yy, expected_hsic(y, y).diag(), rtol=1e-8, atol=1e-8)
    assert all(value.dtype == torch.float64 for value in found)


@pytest.mark.parametrize("widths", [(300, 20), (4, 3)], ids=["wide", "narrow"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-4)])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_cka_is_what_the_definition_says(
    widths: tuple[int, int], dtype: torch.dtype, tolerance: float, offset: float
) -> None:
    x, y = (rows / rows.std() for rows in grid(120, *widths))
    x, y = (x + offset).to(dtype), (y * 1e-3 - offset * 1e-3).to(dtype)
    for batch in (120, 50):
        found = minibatch_cka(x, y, batch)
        torch.testing.assert_close(found, expected_cka(x.double(), y.double(), batch), rtol=0, atol=tolerance)


def test_rank_deficient_and_badly_scaled_rows() -> None:
    x, y = grid(80)
    x[:, :, 3:] = x[:, :, :3] @ random(3, 3)
    x[:, :, 0] *= 1e6
    torch.testing.assert_close(minibatch_cka(x, y, 80), expected_cka(x, y, 80), rtol=0, atol=1e-8)


@pytest.mark.parametrize("n", [5, 256, 257, 700])
def test_both_routes_agree(n: int) -> None:
    x, y = (centred(rows)[0] for rows in grid(n))
    close(gram_pair_sums(x, y), feature_pair_sums(x, y))
    close(gram_pair_sums(x.float(), y.float()), feature_pair_sums(x, y), rtol=1e-4)


def test_the_cheaper_route_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for name in ("gram", "feature"):
        monkeypatch.setattr(
            f"aligners.similarity.algebra.pairs.{name}_pair_sums", lambda x, y, name=name: taken.append(name)
        )
    linear_pair_sums(torch.zeros(2, 10, 50), torch.zeros(2, 10, 50))
    linear_pair_sums(torch.zeros(2, 1000, 5), torch.zeros(2, 1000, 5))
    assert taken == ["gram", "feature"]


def test_of_independent_rows_its_mean_is_zero_where_the_biased_one_is_far_from_it() -> None:
    n, layers = 32, 300
    x, y = random(layers, n, 40), random(1, n, 40, seed=1)
    found = cka_from_hsic(unbiased_hsic(x, y))
    assert abs(found.mean()) < 3 * found.std() / layers**0.5
    assert found.min() < 0  # not clamped
    gram = [(rows - rows.mean(0)) @ (rows - rows.mean(0)).T for rows in (x[0], y[0])]
    assert reference.biased_cka(gram[0].numpy(), gram[1].numpy()) > 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("width", [3, 300])
def test_a_layer_with_itself_is_one(dtype: torch.dtype, width: int) -> None:
    x = random(3, 100, width).to(dtype) + 5
    for batch in (100, 25):
        torch.testing.assert_close(
            minibatch_cka(x, x, batch).diag(), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-12
        )


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 100), scale=st.floats(1e-3, 1e3), shift=st.floats(-1e3, 1e3), batch=st.integers(4, 40))
def test_rotation_scaling_and_translation_change_nothing(seed: int, scale: float, shift: float, batch: int) -> None:
    x, y = grid(40, seed=seed)
    x, y = x[:, : 40 // batch * batch], y[:, : 40 // batch * batch]
    rotation = torch.linalg.qr(random(D_X, D_X, seed=seed)).Q
    moved = scale * (x @ rotation) + shift * scale
    torch.testing.assert_close(minibatch_cka(moved, y, batch), minibatch_cka(x, y, batch), rtol=1e-7, atol=1e-9)


def test_it_is_symmetric() -> None:
    x, y = grid(40)
    torch.testing.assert_close(minibatch_cka(y, x, 20), minibatch_cka(x, y, 20).mT, rtol=1e-12, atol=1e-12)


def test_half_precision_is_lifted() -> None:
    x, y = (rows.bfloat16() for rows in grid(40))
    torch.testing.assert_close(minibatch_cka(x, y, 40), minibatch_cka(x.double(), y.double(), 40), rtol=0, atol=1e-5)


def test_refusals() -> None:
    x, y = grid(40)
    with pytest.raises(ValueError, match="expects at least 4 rows, but `x` and `y` have 3"):
        unbiased_hsic(x[:, :3], y[:, :3])
    with pytest.raises(ValueError, match="`batch` = 38 leaves one of 2 of the 40 rows"):
        minibatch_cka(x, y, 38)
    with pytest.raises(ValueError, match="at least 4 rows, but `batch` = 3"):
        minibatch_cka(x, y, 3)
    with pytest.raises(ValueError, match="same rows"):
        unbiased_hsic(x, y[:, 1:])
    broken = x.clone()
    broken[1, 3, 2] = float("nan")
    with pytest.raises(ValueError, match=r"`x` holds NaN or infinite values in layers \[1\]"):
        unbiased_hsic(broken, y)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6 / 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_constant_features_are_refused(value: float, dtype: torch.dtype) -> None:
    x, y = (rows.to(dtype) for rows in grid(40))
    y[1] = value
    with pytest.raises(ValueError, match=r"`y` whose HSIC .* got 0 at layers \[1\]"):
        minibatch_cka(x, y, 20)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_centred_constants_are_zero_whatever_their_mean_rounds_to(dtype: torch.dtype) -> None:
    values = torch.linspace(-1e4, 1e4, 997, dtype=dtype)
    rounded = 0
    for n in (5, 7, 20, 49, 130):
        x = values.expand(1, n, -1)
        rounded += int((x.mean(1) != values).sum())
        rows, mean = centred(x)
        assert not rows.any()
        assert torch.equal(mean[0, 0], values)
    assert rounded > 0


def test_an_outlier_in_the_first_row_costs_no_digits() -> None:
    x, y = grid(200, 300, 20)
    x[:, 0] *= 1e4
    torch.testing.assert_close(minibatch_cka(x.float(), y.float(), 200), expected_cka(x, y, 200), rtol=0, atol=1e-5)


def test_the_reference_tells_ratios_of_sums_from_means_of_ratios() -> None:
    x, y = grid(40)
    ratios = [minibatch_cka(x[:, rows], y[:, rows], 20) for rows in (slice(0, 20), slice(20, 40))]
    assert not np.allclose(torch.stack(ratios).mean(0), minibatch_cka(x, y, 20), atol=1e-5)
