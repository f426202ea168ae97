"""Two real processes of one job, as a machine with two devices runs them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.processes import PROCESSES, all_ended, as_rank, rank_addresses


def two_ranks(work: Callable[[int], Any], folder: Path, *, meet: bool = True) -> list[Any]:
    """What `work` answers on rank 0 and on rank 1.

    Args:
        work: a function of a module, or a partial one; called with the rank.
        folder: an empty one.
        meet: make the process group before it is called; otherwise that is left to Lightning.
    """
    addresses = enumerate(rank_addresses(2))
    ranks = [PROCESSES.Process(target=_run, args=(rank, work, folder, meet, own)) for rank, own in addresses]
    for process in ranks:
        process.start()
    assert all_ended(ranks) == [0, 0]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def _run(rank: int, work: Callable[[int], Any], folder: Path, meet: bool, address: dict[str, str]) -> None:
    os.environ |= address
    os.environ.pop("ALIGNERS_RUN_FOLDER", None)  # of what the test has run before
    as_rank()
    if meet:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save(work(rank), folder / f"{rank}.pt")
    if torch.distributed.is_initialized():
        assert torch.distributed.get_world_size() == 2
        torch.distributed.destroy_process_group()
