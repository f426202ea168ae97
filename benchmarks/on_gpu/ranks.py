"""Two ranks on two devices: the moments of half the rows each, gathered, are those of all rows on one.

Skipped with a sentence where there is one device.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, distributed, multiprocessing

from aligners.similarity.algebra.moments import Moments, MomentsMetric
from benchmarks.harness import Figures
from benchmarks.on_gpu.device import Device, Skipped

RANKS, WAIT = 2, 60.0  # seconds for which ranks are waited for


def run(figures: Figures, device: Device, small: bool) -> None:
    """Run the part."""
    if not device.gpu or torch.cuda.device_count() < RANKS:
        raise Skipped(f"it takes {RANKS} GPUs")
    sizes = (2, 64, 16) if small else (13, 8192, 768)
    with TemporaryDirectory() as folder:
        group = multiprocessing.spawn(
            work, (folder, "nccl", sizes), nprocs=RANKS, join=False
        )
        end = time.monotonic() + WAIT
        try:
            while not group.join(timeout=1):
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"Expected both ranks to end within {WAIT:.0f} s."
                    )
        finally:
            for process in group.processes:
                process.kill()
        compare(figures, Path(folder), sizes)


def rows(sizes: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """X and Y, (S, N, d) each."""
    x, y = torch.randn(2, *sizes, generator=torch.Generator().manual_seed(0))
    return x + 10, y + x


def moments(x: Tensor, y: Tensor) -> Moments:
    """The moments of the rows of all ranks."""
    metric = MomentsMetric(len(x), x.shape[2], y.shape[2])
    for part_x, part_y in zip(x.split(1024, 1), y.split(1024, 1), strict=True):
        metric.update(part_x, part_y)
    return metric.compute()


def work(rank: int, folder: str, backend: str, sizes: tuple[int, int, int]) -> None:
    """What a rank does: the moments of every second row, and those of both ranks in a file."""
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        backend, init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS
    )
    try:
        x, y = (side[:, rank::RANKS].to(device) for side in rows(sizes))
        torch.save([part.cpu() for part in moments(x, y)], Path(folder) / f"{rank}.pt")
    finally:
        distributed.destroy_process_group()


def compare(figures: Figures, folder: Path, sizes: tuple[int, int, int]) -> None:
    """The moments that each rank has found against those of all rows on the CPU."""
    expected = moments(*rows(sizes))
    for rank in range(RANKS):
        found = torch.load(folder / f"{rank}.pt")
        unlike = max(
            float((a - b).abs().max() / b.abs().max())
            for a, b in zip(found, expected, strict=True)
        )
        figures.add(
            f"moments of rank {rank}, largest relative difference", unlike, bar=1e-10
        )
