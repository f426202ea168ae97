from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligners.similarity.functional.neurons import neuronsim
from tests.references import measures as reference
from tests.rows import CASES, grid, paired, rows_of


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
