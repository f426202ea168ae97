"""What a fit does before its first step: imports, models, texts, the first batch, the first step.

Two GPT-2s of random weights are saved first. `train.py fit` then begins between them in processes of their own, on few
and short texts. "First batch" is everything between the texts and it: the moments of the fitting rows and a validation
come before any map is trained. Seconds are of the wall and of processors; the load says how busy the machine was.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a bare checkout

if TYPE_CHECKING:
    from benchmarks.harness import Figures

Run = Mapping[str, tuple[float, float]]  # step -> seconds at its end
STEPS = ("imports", "options", "models", "texts", "first batch", "first step")
MARKS = "FIRST_STEP_MARKS"  # file of a process that is timed
BEGAN = "FIRST_STEP_BEGAN"


class Marks:
    """Seconds since this process was started, of the wall and of its processors, at the end of each step."""

    def __init__(self) -> None:
        self.began = float(os.environ[BEGAN])
        self.at: dict[str, tuple[float, float]] = {}

    def note(self, step: str) -> None:
        """Note that a step ends now: the last time, where it ends several times."""
        self.at[step] = (time.time() - self.began, time.process_time())

    def after(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose end is noted as that of a step."""

        def noted(*given: Any, **options: Any) -> Any:
            result = function(*given, **options)
            self.note(step)
            return result

        return noted

    def end(self, *_: Any) -> None:
        """Write what was noted, and end the process."""
        self.note("first step")
        Path(os.environ[MARKS]).write_text(json.dumps(self.at))
        os._exit(0)


def fit_to_first_step(words: list[str]) -> None:
    """Run `train.py fit` in this process up to its first step."""
    from aligners.cli import table

    marks = Marks()
    found = table.find

    def find(script: str, name: str) -> Any:
        command = found(script, name)
        marks.note("imports")
        _watch(marks)
        return command

    table.known_options("train", "fit")
    setattr(table, "find", find)  # noqa: B010  (a function of mypy's own type)
    table.train(["fit", *words])


def _watch(marks: Marks) -> None:
    """Note the ends of the further steps. Nothing is imported here that a fit does not import."""
    from aligners.cli import command
    from aligners.datamodules import frozen_models, module
    from aligners.fitting.alignment import Alignment

    patched: dict[tuple[Any, str], str] = {
        (command.Run, "start"): "options",
        (frozen_models, "load_frozen"): "models",
        (module, "load_texts"): "texts",
    }
    for (owner, name), step in patched.items():
        setattr(owner, name, marks.after(step, getattr(owner, name)))
    start, end = "on_train_batch_start", "on_train_batch_end"
    setattr(Alignment, start, lambda *_: marks.note("first batch"))
    setattr(Alignment, end, marks.end)


def timed(words: list[str], folder: Path, threads: int) -> Run:
    """The marks of one process."""
    file = folder / "marks.json"
    began = {MARKS: str(file), BEGAN: str(time.time())}
    environment = {**os.environ, **began, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, __file__, "--fit", *words]
    subprocess.run(command, env=environment, cwd=folder, check=True, stdout=sys.stderr)
    return json.loads(file.read_text())


def words_of(folder: Path, options: argparse.Namespace) -> list[str]:
    """The words of a short fit between two models that are saved now."""
    import torch

    from benchmarks.on_gpu.commands import FULL, saved_model, text_source

    size = FULL._replace(width=options.width, layers=options.layers)
    models = [saved_model(folder / f"gpt-{seed}", size, seed) for seed in (0, 1)]
    place = "gpu" if torch.device(options.device).type == "cuda" else "cpu"
    return [
        *("--data.model_x", str(models[0]), "--data.model_y", str(models[1])),
        *("--data.text.source", text_source(), "--data.sites", "1"),
        *("--data.text.max_texts", "64", "--model.aligners", "mlp"),
        *("--data.batch_size", "8", "--data.max_length", "32"),
        *("--trainer.accelerator", place, "--trainer.limit_train_batches", "2"),
        *("--trainer.limit_val_batches", "1"),
    ]


def add(figures: Figures, runs: Sequence[Run]) -> None:
    """Add the medians over the runs, step by step, and each step's share of the whole."""
    whole = statistics.median(run[STEPS[-1]][0] for run in runs)
    before = [(0.0, 0.0) for _ in runs]
    for step in STEPS:
        spent = []
        for number, run in enumerate(runs):
            wall, processors = run[step]
            last = before[number]
            spent.append((wall - last[0], processors - last[1]))
            before[number] = (wall, processors)
        wall = statistics.median(seconds for seconds, _ in spent)
        processors = statistics.median(seconds for _, seconds in spent)
        figures.add(f"{step}, seconds", wall)
        figures.add(f"{step}, seconds of processors", processors)
        figures.add(f"{step} / whole", wall / whole)
    cores = os.cpu_count() or 1
    figures.add(
        "until after the first step, seconds", whole, bar=6 if cores >= 16 else 9
    )


def main() -> None:
    """Run the benchmark. What it imports, the processes that it times would have imported already."""
    from benchmarks.harness import Figures, parser

    arguments = parser(__doc__)
    arguments.set_defaults(rounds=3)
    arguments.add_argument("--width", type=int, default=768)
    arguments.add_argument("--layers", type=int, default=12)
    options = arguments.parse_args()
    figures = Figures(options.device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = words_of(folder, options)
        timed(
            words, folder, options.threads
        )  # the first keeps what the command's options are
        runs = [timed(words, folder, options.threads) for _ in range(options.rounds)]
    add(figures, runs)
    load, _, _ = os.getloadavg()
    figures.add("load of the machine over the last minute", load)
    figures.write(options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fit"]:
        fit_to_first_step(sys.argv[2:])
    else:
        main()
