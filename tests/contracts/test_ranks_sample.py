"""Minibatch CKA and samples of rows in two real processes: unequal shares, one that has nothing included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from similarity.minibatch import MinibatchCKA
from similarity.sample import RBFCKA, RSA, RowSample

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
        "rsa": RSA(*shape, budget=20),
        "rbf": RBFCKA(*shape, budget=20),
    }
    for batch in batches:
        rows = slice(batch * BATCH, (batch + 1) * BATCH)
        minibatch.update(x[:, rows], y[:, rows])
        for sample in samples.values():
            sample.update(x[:, rows], y[:, rows], torch.arange(ROWS)[rows] // 3, torch.arange(ROWS)[rows] % 3)
    found = {"minibatch": minibatch.compute(), "rsa": samples["rsa"].compute(), "rbf": samples["rbf"].compute()}
    for name in ("few", "all"):
        found |= {f"{name}.{part}": value for part, value in samples[name].compute()._asdict().items()}
    return found


def main(rank: int, folder: Path) -> None:
    """One of two processes."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save({share: accumulate(batches[rank]) for share, batches in SHARES.items()}, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    code = "from pathlib import Path; from tests.contracts.test_ranks_sample import main; main(%d, Path(%r))"
    command = [sys.executable, "-W", "ignore:The ``compute`` method", "-c"]  # a rank has nothing, as is meant
    root = Path(__file__).parents[2]
    ranks = [subprocess.Popen([*command, code % (rank, str(tmp_path))], cwd=root) for rank in range(2)]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    expected = accumulate(list(range(ROWS // BATCH)))
    assert [expected[f"{name}.text"].numel() for name in ("few", "all")] == [17, ROWS]
    for rank in range(2):
        for share, found in torch.load(tmp_path / f"{rank}.pt", weights_only=True).items():
            assert set(found) == set(expected)
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=f"{share} {name}")
