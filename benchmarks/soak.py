"""Whether a long `fit` keeps its memory and its pace.

Runs `train.py fit` on the embedded language models for as long as is asked for, with W&B (offline), checkpoints and
validations as always, and notes every minute the memory of the process and the CPU time of a step without validations.
CPU time, not wall time: what else the machine does hardly changes it. What counts are the slopes over the last two
thirds of the run, per hour.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a bare checkout

os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")  # as the commands do

from benchmarks.harness import Figures, parser
from commands.run import start
from commands.train import fit

OPTIONS = """--data.model_x embedded-gpt:0 --data.model_y embedded-gpt:1 --data.sites blocks --data.batch_size 10
--model.rows 1000000000000 --model.most_steps 1000000000 --model.schedule constant --checkpoint.every_n_minutes 1
--trainer.enable_progress_bar false --early_stopping.patience null"""


class Watch(pl.Callback):
    """Notes memory and the CPU time of training steps, minute by minute.

    Attributes:
        minutes: of each note, since the first step.
        memory: resident, in MiB.
        steps: taken in the minute before.
        cpu: seconds of CPU time that a step of that minute took.
    """

    def __init__(self) -> None:
        self.minutes: list[float] = []
        self.memory: list[float] = []
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
            self.memory.append(resident())
            self.steps.append(self._taken)
            self.cpu.append(self._spent / self._taken)
            self._note, self._taken, self._spent = now, 0, 0.0


def resident() -> float:
    """Resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


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
        words = [*OPTIONS.split(), "--trainer.accelerator", options.device, "--trainer.max_time", limit]
        run = start("fit", made, made.parse_args([*words, "--run", f"{folder}/soak"]))
        trainer = run.trainer(watch, run.made.early_stopping, run.made.checkpoint.inside(run.folder))
        trainer.fit(run.made.model, datamodule=run.made.data, weights_only=True)
    minutes, memory, cpu = (np.array(each) for each in (watch.minutes, watch.memory, watch.cpu))
    late = minutes >= minutes[-1] / 3
    figures = Figures(options.device)
    figures.add("minutes", float(minutes[-1]))
    figures.add("steps", sum(watch.steps))
    for name, values in (("memory, MiB", memory), ("CPU time of a step, ms", 1000 * cpu)):
        for part in range(7):
            place = round(part * (len(values) - 1) / 6)
            figures.add(f"{name}, minute {minutes[place]:.0f}", float(values[place]))
    figures.add("memory, growth in an hour", slope(minutes[late], memory[late]), bar=0.01)
    figures.add("CPU time of a step, growth in an hour", slope(minutes[late], cpu[late]), bar=0.05)
    figures.write(options.json)


if __name__ == "__main__":
    main()
