"""Minibatch CKA and samples of rows in two real processes: unequal shares, one that has nothing included."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor

from similarity.minibatch import MinibatchCKA
from similarity.sample import RowSample
from tests.ranks import two_ranks

LAYERS, ROWS, D_X, D_Y, BATCH = 2, 60, 5, 4, 10
SHARES = {"uneven": [[0, 3, 4, 5], [1, 2]], "nothing": [[0, 1, 2, 3, 4, 5], []]}


def accumulate(batches: list[int]) -> dict[str, Tensor]:
    """What a rank computes after its share of the six batches."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(LAYERS, ROWS, D_X, generator=draw)
    y = x[:, :, :D_Y] + 0.5 * torch.randn(LAYERS, ROWS, D_Y, generator=draw)
    minibatch = MinibatchCKA(LAYERS, LAYERS)
    shape = (LAYERS, LAYERS, D_X, D_Y)
    samples = {
        "few": RowSample(17, *shape),
        "all": RowSample(100, *shape),
    }
    for batch in batches:
        rows = slice(batch * BATCH, (batch + 1) * BATCH)
        minibatch.update(x[:, rows], y[:, rows])
        for sample in samples.values():
            sample.update(x[:, rows], y[:, rows], torch.arange(ROWS)[rows] // 3, torch.arange(ROWS)[rows] % 3)
    found = {"minibatch": minibatch.compute()}
    for name in ("few", "all"):
        found |= {f"{name}.{part}": value for part, value in samples[name].compute()._asdict().items()}
    return found


def shares(rank: int) -> dict[str, dict[str, Tensor]]:
    """What a rank computes after each of its shares."""
    warnings.filterwarnings("ignore", "The ``compute`` method")  # a rank has nothing, as is meant
    return {share: accumulate(batches[rank]) for share, batches in SHARES.items()}


def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    ranks = two_ranks(shares, tmp_path)
    expected = accumulate(list(range(ROWS // BATCH)))
    assert [expected[f"{name}.text"].numel() for name in ("few", "all")] == [17, ROWS]
    for found_of in ranks:
        for share, found in found_of.items():
            assert set(found) == set(expected)
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=f"{share} {name}")
