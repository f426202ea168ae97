"""Retrieval against its definition, with ties, equal rows, chunks and rows that are no numbers."""

import numpy as np
import pytest
import torch
from tests.references import retrieval as reference
from torch import Tensor

from aligners.similarity.functional import retrieval
from aligners.similarity.functional.retrieval import distinct_rows, retrieval_scores

WIDTH = 6


def normal(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed)) + 1


def scattered(n: int = 60, queries: int = 40) -> tuple[Tensor, Tensor]:
    """Mapped rows that are right now and then, and candidates of which some are equal."""
    y = normal(n)
    y[[3, 20, 50]] = y[8].clone()
    y[30] = 2 * y[31]  # as near to anything as another, and yet another row
    return y[:queries] + 0.4 * (normal(queries, 1) - 1), y


@pytest.mark.parametrize("centred", [False, True])
def test_scores_are_those_of_the_definition(centred: bool) -> None:
    mapped, y = scattered()
    found = retrieval_scores(mapped, y, centred=centred)
    expected = reference.retrieval_scores(mapped.double().numpy(), y.double().numpy(), centred=centred)
    assert 0.2 < expected[0].mean() < 0.9
    np.testing.assert_allclose(found, expected, atol=1e-12)
    if not centred:
        assert found[0, 30] == pytest.approx(expected[0, 30])
        assert found[0, 30] in (0, 0.5)


@pytest.mark.parametrize("at_once", [1, 100, 2**22])
def test_chunks_make_no_difference(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    mapped, y = scattered()
    expected = retrieval_scores(mapped, y)
    monkeypatch.setattr(retrieval, "AT_ONCE", at_once)
    torch.testing.assert_close(retrieval_scores(mapped, y), expected, rtol=0, atol=0)


def test_a_perfect_map_is_right_whichever_of_equal_rows_is_meant() -> None:
    _, y = scattered()
    y[30] = normal(1, 5)
    torch.testing.assert_close(retrieval_scores(y, y), torch.ones(3, len(y), dtype=torch.float64))
    noisy = y + 1e-7 * normal(len(y), 2)  # equal but for rounding
    assert len(distinct_rows(torch.cat([y, noisy]))[0]) == len(distinct_rows(y)[0]) == len(y) - 3


def test_sets_of_equal_rows_do_not_depend_on_the_order() -> None:
    _, y = scattered()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    _, sets = distinct_rows(y)
    first, moved = distinct_rows(y[order])
    torch.testing.assert_close(sets[order][:, None] == sets[order], moved[:, None] == moved)
    assert bool((moved[first] == torch.arange(len(first))).all())


def test_a_map_to_one_point_has_the_scores_of_chance() -> None:
    y = normal(50)
    for point, centred in ((torch.zeros(WIDTH), False), (y.double().mean(0), True)):
        found = retrieval_scores(point.expand(50, WIDTH), y, centred=centred).mean(-1)
        chance = [1 / 50, 10 / 50, float((1 / torch.arange(1, 51).double()).mean())]
        torch.testing.assert_close(found, torch.tensor(chance, dtype=torch.float64), rtol=1e-9, atol=0)


def test_candidates_that_rounding_alone_tells_apart_share_their_places() -> None:
    rows = normal(200)
    found = retrieval_scores(rows, torch.cat([rows, 3.7 * rows]))  # of one direction, two by two
    torch.testing.assert_close(found, torch.tensor([0.5, 1, 0.75], dtype=torch.float64)[:, None].expand(3, 200))


def test_rows_that_are_drawn_towards_the_mean_are_found_after_centring() -> None:
    y = normal(300) + torch.tensor([30.0, *[0] * (WIDTH - 1)])
    mapped = y.mean(0) + 0.3 * (y - y.mean(0)) + 0.01 * (normal(300, 1) - 1)
    plain, centred = (float(retrieval_scores(mapped, y, centred=centred)[0].mean()) for centred in (False, True))
    assert centred > 0.9 > 0.5 > plain


def test_rows_that_are_no_numbers_have_no_score_and_change_no_other() -> None:
    mapped, y = scattered()
    expected = retrieval_scores(mapped, y)
    mapped[[2, 5], 0] = torch.tensor([torch.nan, torch.inf])
    found = retrieval_scores(mapped, y)
    assert bool(found[:, [2, 5]].isnan().all())
    kept = [i for i in range(len(mapped)) if i not in (2, 5)]
    torch.testing.assert_close(found[:, kept], expected[:, kept])
