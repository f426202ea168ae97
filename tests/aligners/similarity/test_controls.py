from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from aligners.similarity.controls import cropped, jackknife_interval, matching_layers, permuted_rows


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


@pytest.mark.parametrize(
    ("layers_x", "layers_y", "expected"),
    [
        ([0, 1, 2], [0, 1, 2], [(0, 0), (1, 1), (2, 2)]),
        ([0, 1, 2], [0, 1, 2, 3, 4], [(0, 0), (1, 2), (2, 4)]),
        ([1, 2, 3, 4, 5], [1, 2, 3], [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)]),
        ([4], [2, 3], [(4, 2)]),
    ],
)
def test_layers_match_by_relative_depth(
    layers_x: list[int], layers_y: list[int], expected: list[tuple[int, int]]
) -> None:
    assert matching_layers(layers_x, layers_y) == expected


def test_cropped_attention_is_a_distribution_over_the_words_left() -> None:
    weights = torch.rand(2, 3, 2, 4, 4, generator=torch.Generator().manual_seed(0)).double()
    words = torch.tensor([4, 2])
    found = cropped(weights, words)
    torch.testing.assert_close(found[:, :, 0], weights[:, :, 0] / weights[:, :, 0].sum(-1, keepdim=True))
    part = weights[:, :, 1, :2, :2]
    torch.testing.assert_close(found[:, :, 1, :2, :2], part / part.sum(-1, keepdim=True))
    assert found[:, :, 1, 2:].eq(0).all()
    assert found[:, :, 1, :, 2:].eq(0).all()
