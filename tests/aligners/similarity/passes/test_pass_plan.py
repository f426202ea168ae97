from collections.abc import Hashable
from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligners.similarity.passes.pass_plan import Needs, Pass, Span, Tile, plan_passes

FIXED = 7


def needs_of(tile: Tile) -> Needs:
    """A model takes 5, a layer 1, a layer pair 10; while measures are computed, 3 a layer pair."""
    shared: dict[Hashable, int] = {**dict.fromkeys(tile.pair, 5), **{span: span.size for span in (tile.x, tile.y)}}
    return Needs(shared, 10 * tile.x.size * tile.y.size, 3 * tile.x.size * tile.y.size)


def taken(this: Pass) -> int:
    """What a pass takes, added up anew."""
    needs = [needs_of(tile) for tile in this.tiles]
    shared = {key: size for need in needs for key, size in need.shared.items()}
    return FIXED + sum(shared.values()) + sum(need.own for need in needs) + max(need.work for need in needs)


def pairs(models: int) -> list[tuple[int, int]]:
    return list(combinations_with_replacement(range(models), 2))


@settings(max_examples=30, deadline=None)
@given(layers=st.lists(st.integers(1, 5), min_size=1, max_size=5), limit=st.integers(40, 3000))
def test_every_layer_pair_is_in_one_pass_and_every_pass_within_the_limit(layers: list[int], limit: int) -> None:
    plan = plan_passes(layers, pairs(len(layers)), needs_of, FIXED, limit)
    assert all(this.bytes == taken(this) <= limit for this in plan)
    found = [
        (*tile.pair, a, b)
        for this in plan
        for tile in this.tiles
        for a in range(tile.x.first, tile.x.end)
        for b in range(tile.y.first, tile.y.end)
    ]
    every = [(i, j, a, b) for i, j in pairs(len(layers)) for a in range(layers[i]) for b in range(layers[j])]
    assert sorted(found) == sorted(every)
    leading = [tile for this in plan for tile in this.tiles if tile.leads]
    assert sorted(tile.pair for tile in leading) == pairs(len(layers))
    assert all(tile.x.first == tile.y.first == 0 for tile in leading)
    assert all(tile.whole == (tile.x.size == layers[tile.pair[0]] and tile.y.size == layers[tile.pair[1]])
               for this in plan for tile in this.tiles)  # fmt: skip


def test_what_fits_is_one_pass() -> None:
    (only,) = plan_passes([2, 3, 1], pairs(3), needs_of, FIXED, 10**6)
    assert only.models == [0, 1, 2]
    assert [only.positions(model) for model in only.models] == [[0, 1], [0, 1, 2], [0]]
    assert all(tile.whole for tile in only.tiles)
    # also of measures that keep nothing of pairs, as RSA alone, which keeps a sample of each layer
    (only,) = plan_passes([2, 3], pairs(2), lambda tile: needs_of(tile)._replace(own=0), FIXED, 10**6)
    assert only.bytes == FIXED + 2 * 5 + 2 + 3 + 3 * 9


def test_blocks_of_pairs_share_their_models() -> None:
    layers, most = [1] * 12, 16  # pairs in a pass
    limit = FIXED + most * 10 + 3 + 8 * 6
    plan = plan_passes(layers, pairs(12), needs_of, FIXED, limit)
    read = sum(len(this.models) for this in plan)
    assert len(plan) <= 1.3 * len(pairs(12)) / most
    assert read < 0.75 * sum(min(12, most + 1) for _ in plan)  # row by row, a pass reads nearly all models
    assert max(len(this.tiles) for this in plan) >= most


def test_a_pair_that_is_too_large_is_cut_no_further_than_it_must() -> None:
    plan = plan_passes([4, 4], [(0, 1)], needs_of, FIXED, 90)
    assert {tile.x.size for this in plan for tile in this.tiles} == {2}
    assert [tile.leads for this in plan for tile in this.tiles].count(True) == 1
    halves = [this for this in plan if this.tiles == (Tile(Span(0, 2, 4), Span(1, 0, 2), False, False),)]
    assert [this.positions(0) for this in halves] == [[2, 3]]
    assert halves[0].of(Span(0, 2, 4)) == slice(0, 2)


def test_too_little_memory_is_refused_with_what_it_takes() -> None:
    with pytest.raises(ValueError, match=r"`memory` for at least one layer .* 3\.2e-08 GB, but got 3\.1e-08 GB"):
        plan_passes([3, 3], pairs(2), needs_of, FIXED, 31)
    assert plan_passes([3, 3], pairs(2), needs_of, FIXED, 32)
