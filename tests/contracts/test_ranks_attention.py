"""Attention similarity in two real processes: each sees its share of the texts, both give the whole."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from similarity.attention import AttentionSimilarity
from tests.ranks import two_ranks

WORDS = torch.tensor([4, 1, 2, 5, 3])


def accumulate(rank: int, world: int) -> dict[str, Tensor]:
    """What a rank of `world` computes after it has seen its share: every `world`-th text."""
    draw = torch.Generator().manual_seed(0)
    real = torch.arange(5) < WORDS[:, None]
    a, b = (torch.rand(*shape, 5, 5, 5, generator=draw, dtype=torch.float64) for shape in ((2, 3), (1, 2)))
    a, b = (weights * real[:, :, None] * real[:, None] for weights in (a, b))
    a, b = (weights / weights.sum(-1, keepdim=True).clamp(min=1e-9) for weights in (a, b))
    metric = AttentionSimilarity(2, 3, 1, 2)
    for text in range(rank, len(WORDS), world):
        one = slice(text, text + 1)
        metric.update(a[:, :, one], b[:, :, one], WORDS[one])
    before = metric.sums()
    computed = metric.compute()
    again = metric.sums()  # syncing leaves the rank's own share as it was
    return computed | before._asdict() | {f"{name} again": value for name, value in again._asdict().items()}


def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    ranks = two_ranks(partial(accumulate, world=2), tmp_path)
    expected = accumulate(0, 1)
    assert (expected["texts"], expected["words"]) == (4, 14)
    for found in ranks:
        assert set(found) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)
