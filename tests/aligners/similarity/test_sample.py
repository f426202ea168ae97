from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aligners.similarity import controls
from aligners.similarity.controls import Draw, Sample
from datamodules.rows.policies import row_keys
from tests.runs import related_rows

ROWS, PER_TEXT = 60, 5
TEXT, TOKEN = torch.arange(ROWS) // PER_TEXT, torch.arange(ROWS) % PER_TEXT


def rows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y = related_rows(3, ROWS, 5, 4)
    return x.float(), y[:2].float(), TEXT, TOKEN


class Kept(Draw):
    """A sample that takes rows as a pass over texts does."""

    def __init__(self, budget: int = 20, seed: int = 0) -> None:
        super().__init__(budget, seed)
        self.x, self.y = torch.zeros(3, budget, 5), torch.zeros(2, budget, 4)

    def offer(self, places: Tensor) -> Kept:
        x, y, text, token = (part[..., places, :] if part.ndim == 3 else part[places] for part in rows())
        free, chosen = self.admit(text, token)
        self.x[:, free], self.y[:, free] = x[:, chosen], y[:, chosen]
        return self

    def sample(self, *others: Kept) -> Sample:
        """What all ranks have kept."""
        ranks = (self, *others)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(controls, "collected", lambda own: [(rank.key, rank.text) for rank in ranks])
            self.end(groups=1)
        x, y = (torch.cat(parts, 1) for parts in ([rank.x for rank in ranks], [rank.y for rank in ranks]))
        return Sample(x[:, self.order], y[:, self.order], self.text)


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
    kept = Kept()
    for batch in torch.tensor(order).tensor_split(sorted(cuts)):
        kept.offer(batch)
    same(kept.sample(), expected(20))


def test_a_row_that_comes_twice_is_kept_once() -> None:
    kept = Kept()
    for places in (torch.arange(30).repeat(2), torch.arange(ROWS), torch.arange(10)):
        kept.offer(places)
    same(kept.sample(), expected(20))


def test_a_row_that_two_ranks_have_seen_is_kept_once() -> None:
    same(Kept().offer(torch.arange(40)).sample(Kept().offer(torch.arange(20, ROWS))), expected(20))


def test_with_fewer_rows_than_the_budget_all_are_used() -> None:
    found = Kept(budget=100).offer(torch.arange(ROWS)).sample()
    same(found, expected(ROWS))
    assert len(found.text) == ROWS


def test_another_seed_is_another_sample() -> None:
    first, second = (Kept(seed=seed).offer(torch.arange(ROWS)).sample() for seed in (0, 1))
    same(second, expected(20, seed=1))
    assert not torch.equal(first.x, second.x)
