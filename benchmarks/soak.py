"""Whether a long `fit` keeps its memory and its pace.

Runs `train.py fit` on the embedded language models for as long as is asked for, with W&B (offline), checkpoints and
validations as always, and notes every minute the memory of the process and the CPU time of a step without validations.
CPU time, not wall time: what else the machine does hardly changes it. What counts are the slopes over the last two
thirds of the run, per hour.

Memory is noted twice: what the process holds of the machine's (resident), and what of it is in use (allocated). The
first also has what was freed and lies scattered between, which goes up and down by some per cent; a leak is in both.
"""

import ctypes
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")  # as the commands do

from aligners.cli.command import Run
from aligners.cli.train.fit import fit
from benchmarks.harness import Figures, parser

OPTIONS = """--data.model_x embedded-gpt:0 --data.model_y embedded-gpt:1 --data.sites blocks --data.batch_size 10
--model.rows 1000000000000 --model.most_steps 1000000000 --model.schedule constant --checkpoint.every_n_minutes 1
--trainer.enable_progress_bar false --early_stopping.patience null"""
MALLINFO = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)


class Watch(pl.Callback):
    """Notes memory and the CPU time of training steps, minute by minute.

    Attributes:
        minutes: of each note, since the first step.
        resident: memory, in MiB.
        allocated: likewise.
        steps: taken in the minute before.
        cpu: seconds of CPU time that a step of that minute took.
    """

    def __init__(self) -> None:
        self.minutes: list[float] = []
        self.resident: list[float] = []
        self.allocated: list[float] = []
        self.steps: list[int] = []
        self.cpu: list[float] = []
        self._began: float | None = None
        self._note = 0.0
        self._taken, self._spent, self._from = 0, 0.0, 0.0

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Start the clocks."""
        self._from = time.process_time()
        if self._began is None:
            self._began = self._note = time.monotonic()

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock of the step; every minute, take a note."""
        self._spent += time.process_time() - self._from
        self._taken += 1
        now = time.monotonic()
        if now - self._note >= 60:
            self.minutes.append((now - (self._began or now)) / 60)
            self.resident.append(resident())
            self.allocated.append(allocated())
            self.steps.append(self._taken)
            self.cpu.append(self._spent / self._taken)
            self._note, self._taken, self._spent = now, 0, 0.0


def resident() -> float:
    """Resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class _Mallinfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns, in bytes."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO]


def allocated() -> float:
    """Memory that is allocated and not freed, in MiB: in the heap, and in blocks of its own."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Mallinfo
    found = ask()
    return (found.uordblks + found.hblkhd) / 2**20


def slope(minutes: np.ndarray, values: np.ndarray) -> float:
    """Change of the values in an hour, by least squares, as a share of their mean."""
    return float(np.polyfit(minutes / 60, values, 1)[0] / values.mean())


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--minutes", type=int, default=60)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    os.environ.setdefault("WANDB_MODE", "offline")
    watch, made = Watch(), fit.parser()
    limit = f"00:{options.minutes // 60:02d}:{options.minutes % 60:02d}:00"
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *OPTIONS.split(),
            "--trainer.accelerator",
            options.device,
            "--trainer.max_time",
            limit,
        ]
        run = Run(fit, made, made.parse_args([*words, "--run", f"{folder}/soak"]))
        run.start()
        run.fit(run.training(watch))
    minutes, late = (
        np.array(watch.minutes),
        np.array(watch.minutes) >= watch.minutes[-1] / 3,
    )
    courses = {
        "resident memory, MiB": (np.array(watch.resident), 0.01),
        "allocated memory, MiB": (np.array(watch.allocated), 0.01),
        "CPU time of a step, ms": (1000 * np.array(watch.cpu), 0.05),
    }
    figures = Figures(options.device)
    figures.add("minutes", float(minutes[-1]))
    figures.add("steps", sum(watch.steps))
    for name, (values, _) in courses.items():
        for part in range(13):
            place = round(part * (len(values) - 1) / 12)
            figures.add(f"{name}, minute {minutes[place]:.0f}", float(values[place]))
    for name, (values, bar) in courses.items():
        figures.add(
            f"{name.partition(',')[0]}, growth in an hour",
            slope(minutes[late], values[late]),
            bar=bar,
        )
    figures.write(options.json)


if __name__ == "__main__":
    main()
