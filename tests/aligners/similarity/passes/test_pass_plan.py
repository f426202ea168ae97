from collections.abc import Sequence
from itertools import combinations_with_replacement, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligners.similarity.passes.pass_plan import Span, Tile, plan_passes, spans_of

FIXED = 7


def bytes_of(tiles: Sequence[Tile]) -> int:
    """A model takes 5, a layer 1, a layer pair 10; while measures are computed, 3 a layer pair."""
    spans, sizes = spans_of(tiles), [tile.x.size * tile.y.size for tile in tiles]
    of_models = 5 * len({span.model for span in spans}) + sum(span.size for span in spans)
    return FIXED + of_models + 10 * sum(sizes) + 3 * max(sizes)


def pairs(models: int) -> list[tuple[int, int]]:
    return list(combinations_with_replacement(range(models), 2))


@settings(max_examples=30, deadline=None)
@given(layers=st.lists(st.integers(1, 5), min_size=1, max_size=5), limit=st.integers(40, 3000))
def test_every_layer_pair_is_in_one_pass_and_every_pass_within_the_limit(layers: list[int], limit: int) -> None:
    plan = plan_passes(layers, pairs(len(layers)), bytes_of, limit)
    assert all(this.bytes == bytes_of(this.tiles) <= limit for this in plan)
    tiles = [tile for this in plan for tile in this.tiles]
    found = []
    for tile in tiles:
        found += product([tile.pair], range(tile.x.first, tile.x.end), range(tile.y.first, tile.y.end))
    every = [
        (pair, a, b) for pair in pairs(len(layers)) for a in range(layers[pair[0]]) for b in range(layers[pair[1]])
    ]
    assert sorted(found) == sorted(every)
    assert sorted(tile.pair for tile in tiles if tile.leads) == pairs(len(layers))
    for tile in tiles:
        assert tile.whole == (tile.x.size == layers[tile.x.model] and tile.y.size == layers[tile.y.model])


def test_what_fits_is_one_pass() -> None:
    (only,) = plan_passes([2, 3, 1], pairs(3), bytes_of, 10**6)
    assert only.models == [0, 1, 2]
    assert [only.positions(model) for model in only.models] == [[0, 1], [0, 1, 2], [0]]
    assert all(tile.whole for tile in only.tiles)


def test_passes_are_filled_as_far_as_it_goes() -> None:
    plan = plan_passes([1] * 12, pairs(12), bytes_of, FIXED + 16 * 10 + 3 + 12 * 6)
    assert len(plan) == 5  # 78 pairs, 16 of them at a time


def test_a_pair_that_is_too_large_is_cut_no_further_than_it_must() -> None:
    plan = plan_passes([4, 4], [(0, 1)], bytes_of, 90)
    assert {tile.x.size for this in plan for tile in this.tiles} == {2}
    assert [tile.leads for this in plan for tile in this.tiles].count(True) == 1
    halves = [this for this in plan if this.tiles == (Tile(Span(0, 2, 4), Span(1, 0, 2), False),)]
    assert [this.positions(0) for this in halves] == [[2, 3]]
    assert halves[0].of(Span(0, 2, 4)) == slice(0, 2)


def test_too_little_memory_is_refused_with_what_it_takes() -> None:
    with pytest.raises(ValueError, match=r"`memory` for at least one layer .* 3\.2e-08 GB, but got 3\.1e-08 GB"):
        plan_passes([3, 3], pairs(2), bytes_of, 31)
    assert plan_passes([3, 3], pairs(2), bytes_of, 32)
