from typing import Self

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.runs import related_rows
from torch import Tensor

from aligners.datamodules.rows.token_pairs import row_keys
from aligners.similarity import controls
from aligners.similarity.controls import Draw, Sample, cropped, jackknife_interval, matching_layers


def test_the_interval_of_a_mean_is_students() -> None:
    values = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left_out = (values.sum() - values) / 11
    low, high = jackknife_interval(values.mean(), left_out)
    expected = stats.t.interval(0.95, 11, loc=values.mean().item(), scale=stats.sem(values.numpy()))
    assert (low.item(), high.item()) == pytest.approx(expected, rel=1e-12)
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


# ---------------------------------------------------------------------- a sample of rows

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

    def offer(self, places: Tensor) -> Self:
        x, y, text, token = (part[..., places, :] if part.ndim == 3 else part[places] for part in rows())
        free, chosen = self.admit(text, token)
        self.x[:, free], self.y[:, free] = x[:, chosen], y[:, chosen]
        return self

    def sample(self, *others: Self) -> Sample:
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


@pytest.mark.parametrize("seed", [0, -3, 2**62])
def test_keys_are_those_of_exact_arithmetic(seed: int) -> None:
    text, token = torch.arange(500) * 12345, torch.arange(500) % 7
    expected_keys = [splitmix(seed, *ids) for ids in zip(text.tolist(), token.tolist(), strict=True)]
    assert row_keys(seed, text, token).tolist() == expected_keys


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(ROWS)), cuts=st.sets(st.integers(1, ROWS - 1), max_size=6))
def test_any_batches_in_any_order_give_the_same_sample(order: list[int], cuts: set[int]) -> None:
    kept = Kept()
    for batch in torch.tensor(order).tensor_split(sorted(cuts)):
        kept.offer(batch)
    same(kept.sample(), expected(20))


@pytest.mark.parametrize(
    ("batches", "of_the_other", "budget", "seed"),
    [
        ((torch.arange(30).repeat(2), torch.arange(ROWS), torch.arange(10)), (), 20, 0),  # rows that come twice
        ((torch.arange(40),), (torch.arange(20, ROWS),), 20, 0),  # or to two ranks
        ((torch.arange(ROWS),), (), 100, 0),  # fewer than the budget
        ((torch.arange(ROWS),), (), 20, 1),
    ],
)
def test_each_row_is_kept_once(
    batches: tuple[Tensor, ...], of_the_other: tuple[Tensor, ...], budget: int, seed: int
) -> None:
    kept, other = Kept(budget, seed), Kept(budget, seed)
    for places in batches:
        kept.offer(places)
    for places in of_the_other:
        other.offer(places)
    same(kept.sample(other), expected(min(budget, ROWS), seed))
