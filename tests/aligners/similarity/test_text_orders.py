"""Orders of texts: what they keep, and that p is uniform without similarity and least with it."""

from collections.abc import Callable
from math import factorial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from aligners.similarity.controls import calibrated
from aligners.similarity.functional.cka import linear_cka
from aligners.similarity.functional.kernels import rsa
from aligners.similarity.text_orders import AS_PAIRED, permuted_rows, sure_orders, windows

COUNTS = st.lists(st.integers(1, 12), min_size=2, max_size=24)


def texts_of(counts: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(counts)) * 7 + 3, torch.tensor(counts))


@settings(max_examples=60, deadline=None)
@given(counts=COUNTS, order=st.integers(1, 9), seed=st.integers(-5, 5))
def test_texts_are_exchanged_whole_and_rows_keep_their_places(counts: list[int], order: int, seed: int) -> None:
    text = texts_of(counts)
    token = torch.cat([torch.arange(count) for count in counts])
    rows, partners = permuted_rows(text, order, seed)
    same, itself = permuted_rows(text, AS_PAIRED, seed)
    assert torch.equal(same, itself)
    assert torch.equal(rows, same)  # the same rows of X in every order, as they come
    assert torch.equal(partners.sort().values, itself)  # and of Y
    assert torch.equal(token[rows], token[partners])
    partner_of = {}
    for a, b in zip(text[rows].tolist(), text[partners].tolist(), strict=True):
        assert partner_of.setdefault(a, b) == b  # a text meets one text alone
    assert sorted(partner_of) == sorted(partner_of.values())


@settings(max_examples=60, deadline=None)
@given(counts=COUNTS)
def test_windows_hold_texts_of_like_length(counts: list[int]) -> None:
    found = windows(torch.tensor(counts))
    places = torch.cat(found)
    assert len(places.unique()) == len(places) >= len(counts) - 1
    assert all(len(window) >= min(8, len(counts)) for window in found[:-1])
    for window in found:
        lengths = sorted((counts[place] for place in window.tolist()), reverse=True)
        assert all(length >= 0.75 * lengths[0] for length in lengths[8:])


def test_all_orders_of_a_small_batch_are_equally_likely_and_others_differ() -> None:
    text = torch.arange(4).repeat_interleave(2)
    drawn = [tuple(permuted_rows(text, order)[1].tolist()) for order in range(1, 721)]
    counts = [drawn.count(each) for each in set(drawn)]
    assert len(counts) == factorial(4)
    assert stats.chisquare(counts).pvalue > 1e-3
    other_batch = [tuple(permuted_rows(text + 4, order)[1].tolist()) for order in range(1, 721)]
    other_seed = [tuple(permuted_rows(text, order, 1)[1].tolist()) for order in range(1, 721)]
    for others in (other_batch, other_seed):
        agree = sum(a == b for a, b in zip(drawn, others, strict=True))
        assert stats.binomtest(agree, 720, 1 / 24).pvalue > 1e-3  # independent of each other
    assert sure_orders([4, 2, 9]) == 24 * 2 * factorial(8)
    with pytest.raises(ValueError, match=r"at least 2 texts in every batch, but got 1.*`batch_size`"):
        permuted_rows(torch.zeros(5), 1)


def stream(generator: torch.Generator, counts: Tensor, d: int) -> Tensor:
    """Rows (N, d) with an effect of their text and one of their place in it."""
    of_text = torch.randn(len(counts), d, generator=generator, dtype=torch.float64)
    place = torch.cat([torch.arange(count) for count in counts.tolist()])
    rows = of_text.repeat_interleave(counts, 0) * 2
    rows[:, 0] += 8.0 / (1 + place)
    return rows + torch.randn(len(rows), d, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("formula", [linear_cka, rsa])
def test_p_is_uniform_for_unrelated_streams_and_least_for_a_true_pair(formula: Callable[..., Tensor]) -> None:
    draws = 9
    found = []
    for number in range(110):
        generator = torch.Generator().manual_seed(number)
        counts = torch.randint(2, 9, (24,), generator=generator).sort(descending=True).values
        batches = list(torch.arange(24).repeat_interleave(counts).split([int(part.sum()) for part in counts.split(12)]))
        x = stream(generator, counts, 3)
        related = number >= 105
        y = 3 * x[:, [1, 2]] if related else stream(generator, counts, 2)
        values = []
        for order in range(draws + 1):
            pairs = [permuted_rows(batch, order, number) for batch in batches]
            start = 0
            of_x, of_y = [], []
            for batch, (rows_x, rows_y) in zip(batches, pairs, strict=True):
                of_x.append(rows_x + start)
                of_y.append(rows_y + start)
                start += len(batch)
            values.append(formula(x[None, torch.cat(of_x)], y[None, torch.cat(of_y)]))
        figures = calibrated(values[0] + 9, torch.stack(values[1:]), values[0])  # nothing is from the first
        if related:
            assert figures.p.item() == figures.p_family.item() == 1 / (1 + draws)
        else:
            found.append(round(figures.p.item() * (draws + 1)))
    counts_of_p = [found.count(each) for each in range(1, draws + 2)]
    assert stats.chisquare(counts_of_p).pvalue > 1e-3, counts_of_p
