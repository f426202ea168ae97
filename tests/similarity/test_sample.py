from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from similarity.sample import RowSample, Sample, row_keys
from tests.runs import related_rows

ROWS, PER_TEXT = 60, 5
TEXT, TOKEN = torch.arange(ROWS) // PER_TEXT, torch.arange(ROWS) % PER_TEXT


def rows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y = related_rows(3, ROWS, 5, 4)
    return x.float(), y[:2].float(), TEXT, TOKEN


def sampler(budget: int = 20, seed: int = 0) -> RowSample:
    return RowSample(budget, 3, 2, 5, 4, seed=seed)


def offered(metric: RowSample, places: Tensor) -> RowSample:
    x, y, text, token = rows()
    metric.update(x[:, places], y[:, places], text[places], token[places])
    return metric


def splitmix(seed: int, text: int, token: int) -> int:
    """The key in Python's integers, which never wrap."""
    cut, state = 2**64 - 1, seed % 2**64
    for part in (0, text, token):
        state = ((state ^ part) + 0x9E3779B97F4A7C15) & cut
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & cut
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & cut
        state ^= state >> 31
    return state % 2**63


def expected(budget: int, seed: int = 0) -> Sample:
    x, y, text, token = rows()
    order = sorted(range(ROWS), key=lambda row: splitmix(seed, int(text[row]), int(token[row])))[:budget]
    return Sample(x[:, order], y[:, order], text[order])


def same(found: Sample, wanted: Sample) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("seed", [0, 1, -3, 2**62])
def test_keys_are_those_of_exact_arithmetic(seed: int) -> None:
    text, token = torch.arange(500) * 12345, torch.arange(500) % 7
    expected_keys = [splitmix(seed, *ids) for ids in zip(text.tolist(), token.tolist(), strict=True)]
    assert row_keys(seed, text, token).tolist() == expected_keys


def test_keys_are_spread_evenly_and_unrelated_to_places() -> None:
    text, token = torch.arange(100_000) // 20, torch.arange(100_000) % 20
    share = row_keys(0, text, token).double() / 2**63
    counts = torch.histc(share, 50, 0, 1)
    assert ((counts - 2000).square().sum() / 2000) < 49 + 5 * (2 * 49) ** 0.5  # χ² of 49 degrees of freedom
    related = torch.stack([share, text.double(), token.double(), row_keys(1, text, token).double()])
    assert torch.corrcoef(related)[0, 1:].abs().max() < 5 / 100_000**0.5
    assert len(share.unique()) == 100_000


@settings(max_examples=40, deadline=None)
@given(order=st.permutations(range(ROWS)), cuts=st.sets(st.integers(1, ROWS - 1), max_size=6))
def test_any_batches_in_any_order_give_the_same_sample(order: list[int], cuts: set[int]) -> None:
    metric = sampler()
    for batch in torch.tensor(order).tensor_split(sorted(cuts)):
        offered(metric, batch)
    same(metric.compute(), expected(20))


def test_a_row_that_comes_twice_is_kept_once() -> None:
    metric = sampler()
    for places in (torch.arange(30).repeat(2), torch.arange(ROWS), torch.arange(10)):
        offered(metric, places)
    same(metric.compute(), expected(20))


def test_a_row_that_two_ranks_have_seen_is_kept_once() -> None:
    metric = offered(sampler(), torch.arange(40))
    other = offered(sampler(), torch.arange(20, ROWS))
    for name in ("key", "text", "x", "y"):
        setattr(metric, name, torch.stack([getattr(metric, name), getattr(other, name)]))
    same(RowSample.compute(metric), expected(20))


def test_with_fewer_rows_than_the_budget_all_are_used() -> None:
    metric = sampler(budget=100)
    offered(metric, torch.arange(ROWS))
    found = metric.compute()
    same(found, expected(ROWS))
    assert len(found.text) == ROWS


def test_another_seed_is_another_sample() -> None:
    first, second = (offered(sampler(seed=seed), torch.arange(ROWS)).compute() for seed in (0, 1))
    same(second, expected(20, seed=1))
    assert not torch.equal(first.x, second.x)


def test_reset_and_reused_and_called() -> None:
    metric = offered(sampler(), torch.arange(40))
    with torch.inference_mode():
        metric.reset()
    same(offered(metric, torch.arange(ROWS)).compute(), expected(20))
    metric.reset()
    x, y, text, token = rows()
    metric(x[:, :30], y[:, :30], text[:30], token[:30])
    metric(x[:, 30:], y[:, 30:], text[30:], token[30:])
    same(metric.compute(), expected(20))
    assert torch.nn.ModuleList([metric]).to(torch.float16)[0].x.dtype == torch.float32


def test_refusals() -> None:
    x, y, text, token = rows()
    with pytest.raises(ValueError, match=r"`budget`.*got 0"):
        sampler(budget=0)
    with pytest.raises(ValueError, match=r"as many rows, but got .*'text': 59, 'token': 60"):
        sampler().update(x, y, text[1:], token)
