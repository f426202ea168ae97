"""Measures of neighbourhoods against whole matrices, ties, and what does not change them."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from tests.references import neighbours as reference
from tests.rows import TEN, data_set, grid, paired

from aligners.similarity.functional import neighbours
from aligners.similarity.functional.neighbours import Neighbours, cknna, jaccard_knn, mutual_knn, of_pairs

MEASURES: dict[str, Callable[..., torch.Tensor]] = {
    "mutual_knn": mutual_knn, "jaccard_knn": jaccard_knn, "cknna": cknna,
}  # fmt: skip
every_measure = pytest.mark.parametrize("name", MEASURES)


@every_measure
@pytest.mark.parametrize("case", TEN)
@pytest.mark.parametrize("grouped", [False, True])
def test_they_are_what_the_definitions_say(name: str, case: str, grouped: bool) -> None:
    x, y = data_set(case)
    groups = torch.arange(x.shape[1]) // 3 if grouped else None
    numbers = groups.numpy() if groups is not None else None
    expected = grid(partial(getattr(reference, name), k=4, groups=numbers), x, y)
    assert expected.std() > 1e-4 or case == "few"
    torch.testing.assert_close(MEASURES[name](x, y, 4, groups), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("case", [*TEN, "one part far from rows of nearly one direction"])
@pytest.mark.parametrize("grouped", [False, True])
def test_those_without_each_part_in_turn_are_those_of_the_other_rows(
    monkeypatch: pytest.MonkeyPatch, case: str, grouped: bool
) -> None:
    if case in TEN:
        rows = data_set(case)[0][0]
    else:
        generator = torch.Generator().manual_seed(0)
        rows = torch.ones(60, 5) + 1e-6 * torch.randn(60, 5, generator=generator, dtype=torch.float64)
        rows[50:] = -torch.randn(10, 5, generator=generator).double()
    n, k = len(rows), 3
    groups = torch.arange(n) // 2 if grouped else None
    sizes = [n // 4, n // 3, 2, n - n // 4 - n // 3 - 2]
    sizes = [*sizes[:3], sizes[3] // 2 * 2, sizes[3] % 2]
    sizes = [size for size in sizes if size]
    if case not in TEN:
        sizes = [20, 30, 10]
    for at_once in (neighbours.AT_ONCE, 7 * n):
        monkeypatch.setattr(neighbours, "AT_ONCE", at_once)
        found = neighbours.neighbours_of_rests(rows, "x", sizes, k, groups)
        assert len(found) == len(sizes)
        start = 0
        for size, near in zip(sizes, found, strict=True):
            kept = torch.cat([torch.arange(start), torch.arange(start + size, n)])
            expected = Neighbours.of(rows[kept], k, None if groups is None else groups[kept])
            assert (near.n, near.k) == (expected.n, expected.k)
            assert torch.equal(near.place, expected.place)
            torch.testing.assert_close(near.weight, expected.weight, rtol=0, atol=1e-12)
            torch.testing.assert_close(near.cosine, expected.cosine, rtol=0, atol=1e-12)
            start += size


def test_too_few_rows_outside_of_a_part_are_refused() -> None:
    x, _ = paired(12)
    with pytest.raises(ValueError, match=r"`k` of at most 6, as .* among 7 rows, but got 7"):
        neighbours.neighbours_of_rests(x[0], "x", [5, 7], 7)
    same = torch.cat([x[0][:6], torch.ones(6, 6)])
    with pytest.raises(ValueError, match="has rows of one direction"):
        neighbours.neighbours_of_rests(same, "y", [6, 6], 2)


def test_without_ties_neighbours_are_those_of_the_released_code() -> None:
    x, _ = paired(80)
    rows = x[0] / x[0].norm(dim=1, keepdim=True)
    near = Neighbours.of(x[0], 7)
    assert torch.equal(near.weight, torch.ones(80 * 7, dtype=torch.float64))
    found = [set((near.place[near.place // 80 == i] % 80).tolist()) for i in range(80)]
    assert found == reference.sets_of_code(x[0].numpy(), 7)
    torch.testing.assert_close(near.cosine, (rows @ rows.T).flatten()[near.place], rtol=0, atol=1e-12)


@every_measure
def test_invariances(name: str) -> None:
    measure, (x, y) = MEASURES[name], paired(50, seed=3)
    value = measure(x, y, 5)
    turn = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    lengths = torch.linspace(0.1, 5, 50, dtype=torch.float64)[:, None]
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    same = {"turned": (7 * x @ turn, y), "lengths": (x * lengths, y), "order": (x[:, order], y[:, order])}
    for what, given in same.items():
        torch.testing.assert_close(measure(*given, 5), value, rtol=0, atol=1e-10, msg=what)
    torch.testing.assert_close(measure(y, x, 5).mT, value, rtol=0, atol=5e-3 if name == "cknna" else 1e-12)
    torch.testing.assert_close(measure(x, x, 5).diag(), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-12)
    assert (measure(x + 5, y, 5) - value).abs().max() > 1e-3  # the mean counts
    assert (measure(x[:, order], y, 5) - value).abs().max() > 0.01


@every_measure
def test_neither_blocks_nor_the_order_of_rows_matter_where_rows_are_repeated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = data_set("duplicates")
    value = MEASURES[name](x, y, 4)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(2))
    for size in (1, 700, 60 * 60):
        monkeypatch.setattr(neighbours, "AT_ONCE", size)
        torch.testing.assert_close(MEASURES[name](x, y, 4), value, rtol=0, atol=1e-12)
        torch.testing.assert_close(MEASURES[name](x[:, order], y[:, order], 4), value, rtol=0, atol=1e-12)
    torch.testing.assert_close(MEASURES[name](x, x, 4).diag(), torch.ones(2, dtype=torch.float64))


def test_rows_that_nothing_tells_apart_have_the_value_of_chance() -> None:
    _, y = paired(41)
    x = torch.cat([torch.ones(1, 40, 3), torch.tensor([[[1.0, 2, 3]]])], 1).double()
    found = mutual_knn(x, y[:1, :], 8)
    assert float(found) == pytest.approx(8 / 39, abs=0.02)  # 40 equal rows: each of the others is as near


def test_reordered_neighbours_are_those_of_reordered_rows() -> None:
    x, y = data_set("duplicates")
    order = torch.randperm(60, generator=torch.Generator().manual_seed(3))
    near = [Neighbours.of(rows, 4) for rows in (x[0], y[0])]
    for name, formula in (("mutual_knn", neighbours.mutual), ("cknna", neighbours.local_cka)):
        found = of_pairs(near[:1], [near[1].reordered(order)], formula)
        torch.testing.assert_close(found, MEASURES[name](x[:1], y[:1, order], 4), rtol=0, atol=1e-12)


def test_a_text_is_not_among_its_own_neighbours() -> None:
    draw = np.random.default_rng(0)
    text = torch.arange(60) // 6
    of_texts = torch.from_numpy(draw.standard_normal((10, 8)))
    x, y = (of_texts[text] + 0.1 * torch.from_numpy(draw.standard_normal((60, 8))) for _ in range(2))
    assert float(mutual_knn(x[None], y[None], 5)) == 1  # the five others of the text
    near = Neighbours.of(x, 5, text)
    assert not (text[near.place // 60] == text[near.place % 60]).any()


@every_measure
def test_refusals(name: str) -> None:
    measure, (x, y) = MEASURES[name], paired(20)
    zero, ray = x.clone(), x.clone()
    zero[1, 3] = 0
    ray[2] = x[0, :1] * torch.linspace(1, 2, 20, dtype=torch.float64)[:, None]
    text = torch.arange(20) // 10
    for given, says in (
        ((x, y, 20), "`k` of at most 19.* among 20 rows, but got 20"),
        ((x, y, 11, text), "`k` of at most 10.* not of its own group among 20 rows, but got 11"),
        ((x, y, 5, text[:9]), r"`groups` of shape \(20,\), but got \(9,\)"),
        ((x, y, 0), "`k` to be at least"),
        ((x[:, :3], y[:, :3], 2), "at least 4 rows"),
        ((x / 0, y, 5), "finite"),
        ((zero, y, 5), r"`x` has 1 rows of zeros in layers \[1\]"),
        ((ray, y, 5), r"`x` has rows of one direction in layers \[2\]"),
        ((x, y[:, :9], 5), "same rows"),
    ):
        with pytest.raises(ValueError, match=says):
            measure(*given)


def test_cknna_needs_two_neighbours() -> None:
    x, y = paired(20)
    with pytest.raises(ValueError, match="`k` to be at least 2, but got 1"):
        cknna(x, y, 1)
