from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from similarity.controls import jackknife_interval, permuted_rows


@settings(max_examples=80, deadline=None)
@given(
    counts=st.lists(st.integers(1, 9), min_size=2, max_size=8),
    share=st.floats(0.01, 0.99),
)
def test_no_row_meets_its_own_text_and_order_is_kept(counts: list[int], share: float) -> None:
    text = torch.repeat_interleave(torch.arange(len(counts)) * 7 + 3, torch.tensor(counts))
    rows, partners = permuted_rows(text, share)
    assert (text[rows] != text[partners]).all()
    assert len(rows.unique()) == len(rows)
    assert len(partners.unique()) == len(partners)
    assert ((partners - rows) % len(text)).unique().numel() <= 1  # one roll: within a text, order stays


def test_texts_of_one_length_keep_every_row() -> None:
    text = torch.arange(6).repeat_interleave(4)
    rows, partners = permuted_rows(text, 0.5)
    assert rows.tolist() == list(range(24))
    assert (text[partners] - text[rows]).remainder(6).eq(3).all()


def test_one_text_cannot_be_permuted() -> None:
    with pytest.raises(ValueError, match=r"at least 2 texts in every batch, but got 1.*`batch_size`"):
        permuted_rows(torch.zeros(5), 0.5)


def test_the_interval_of_a_mean_is_students() -> None:
    values = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left_out = (values.sum() - values) / 11
    low, high = jackknife_interval(values.mean(), left_out)
    expected = stats.t.interval(0.95, 11, loc=values.mean().item(), scale=stats.sem(values.numpy()))
    assert (low.item(), high.item()) == pytest.approx(expected, rel=1e-12)


def test_shapes_and_what_is_missing() -> None:
    low, high = jackknife_interval(torch.ones(2, 3), torch.full((4, 2, 3), torch.nan))
    assert low.shape == high.shape == (2, 3)
    assert low.isnan().all()
    with pytest.raises(ValueError, match="at least 2 groups"):
        jackknife_interval(torch.ones(()), torch.ones(1))
