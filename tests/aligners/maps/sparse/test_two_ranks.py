"""Sparse dictionaries on two processes, each with rows of its own."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.aligners.maps.sparse.test_crosscoder import made, states
from tests.ranks import two_ranks
from torch import Tensor

STEPS = 4
Rows = list[Tensor]


def after_steps(rows: list[Rows], **options: Any) -> dict[str, Tensor]:
    """What steps with these rows leave, of weights that stay."""
    crosscoder = made(2, **options)
    with torch.no_grad():
        for given in rows:
            crosscoder.loss(given)
            crosscoder.settle(given)
    return {"threshold": crosscoder.threshold, "since": crosscoder.since}


def rows_of(rank: int) -> list[Rows]:
    """One row at each step, so that some latents do not fire for a while."""
    return [states(2, 1, seed=2 * step + rank) for step in range(STEPS)]


def on_rank(rank: int, options: dict[str, Any], *, same: bool) -> dict[str, Tensor]:
    return after_steps(rows_of(0 if same else rank), **options)


def together(first: list[Rows], second: list[Rows]) -> list[Rows]:
    """The rows of both ranks, side by side at each step."""
    steps = []
    for pair in zip(first, second, strict=True):
        step = [torch.cat(parts, 1) for parts in zip(*pair, strict=True)]
        steps.append(step)
    return steps


@pytest.mark.parametrize(("options", "same"), [({}, True), ({"selection": "l1"}, True), ({"selection": "l1"}, False)])
def test_two_processes_know_what_one_with_their_rows_knows(options: dict[str, Any], same: bool, tmp_path: Path) -> None:
    both = two_ranks(partial(on_rank, options=options, same=same), tmp_path)
    one = after_steps(together(rows_of(0), rows_of(0 if same else 1)), **options)
    assert one["since"].unique().numel() > 2
    for found in both:
        assert torch.equal(found["since"], one["since"])
        torch.testing.assert_close(found["threshold"], one["threshold"])


def test_each_process_selects_from_its_rows_and_both_know_the_same(tmp_path: Path) -> None:
    both = two_ranks(partial(on_rank, options={}, same=False), tmp_path)
    alone = [after_steps(rows_of(rank)) for rank in range(2)]
    since = torch.minimum(alone[0]["since"], alone[1]["since"])
    assert not torch.equal(since, alone[0]["since"])
    threshold = (alone[0]["threshold"] + alone[1]["threshold"]) / 2
    for found in both:
        assert torch.equal(found["since"], 2 * since)  # rows of both count
        torch.testing.assert_close(found["threshold"], threshold)
