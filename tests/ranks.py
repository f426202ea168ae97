"""Two real processes of one job, as a machine with two devices runs them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only

from tests.processes import HANGS, PROCESSES

__all__ = ["two_ranks"]


def two_ranks(work: Callable[[int], Any], folder: Path, *, meet: bool = True) -> list[Any]:
    """What `work` answers on rank 0 and on rank 1.

    Args:
        work: a function of a module, or a partial one; called with the rank.
        folder: an empty one.
        meet: make the process group before it is called; otherwise that is left to Lightning.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    ranks = [PROCESSES.Process(target=_run, args=(rank, work, folder, meet, port)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        running = ranks
        while running and not any(rank.exitcode for rank in ranks):  # one that fails leaves the other waiting
            assert wait([rank.sentinel for rank in running], HANGS)
            running = [rank for rank in running if rank.exitcode is None]
        assert [rank.exitcode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def _run(rank: int, work: Callable[[int], Any], folder: Path, meet: bool, port: int) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2", **address}
    os.environ.pop("ALIGNERS_RUN_FOLDER", None)  # of what the test has run before
    rank_zero_only.rank = rank  # as where it is imported under this address
    if meet:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save(work(rank), folder / f"{rank}.pt")
    if torch.distributed.is_initialized():
        assert torch.distributed.get_world_size() == 2
        torch.distributed.destroy_process_group()
