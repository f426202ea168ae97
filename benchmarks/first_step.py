"""What a fit does before its first step: imports, models, texts, the first batch, the first step.

`train.py fit` begins in processes of their own, on few and short texts, between the models that `--models` names or
between two GPT-2s of random weights that are saved first. "First batch" is everything between the texts and it: the
moments of the fitting rows and a validation come before any map is trained. Seconds are of the wall and of processors;
the load says how busy the machine was. Beside them is a process that only imports torch, Lightning and transformers.
Modules are read as bytecode, as an installed package's are, also where the environment says to write none.

`--before` names another checkout of the project, whose runs alternate with those of this one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a bare checkout

if TYPE_CHECKING:
    from benchmarks.harness import Figures

Run = Mapping[str, tuple[float, float]]  # step -> seconds at its end
STEPS = ("imports", "options", "models", "texts", "first batch", "first step")
LAST = STEPS[-1]
MARKS = "FIRST_STEP_MARKS"  # file of a process that is timed
BEGAN = "FIRST_STEP_BEGAN"
BARE = "import torch, lightning.pytorch, transformers"


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

    watched: list[tuple[Any, str, str]] = [
        (command.Run, "start", "options"),
        (frozen_models, "load_frozen", "models"),
        (module, "load_texts", "texts"),
    ]
    for owner, name, step in watched:
        function = getattr(owner, name)
        setattr(owner, name, marks.after(step, function))
    hooks: Any = Alignment
    hooks.on_train_batch_start = lambda *_: marks.note("first batch")
    hooks.on_train_batch_end = marks.end


def timed(words: list[str], folder: Path, threads: int, checkout: Path = ROOT) -> Run:
    """The marks of one process, which runs the sources of a checkout."""
    file = folder / "marks.json"
    environment = environment_of(threads)
    environment |= {MARKS: str(file), BEGAN: str(time.time())}
    script = checkout / "benchmarks" / "first_step.py"
    command = [sys.executable, str(script), "--fit", *words]
    subprocess.run(command, env=environment, cwd=folder, check=True, stdout=sys.stderr)
    return json.loads(file.read_text())


def timed_bare(threads: int) -> tuple[float, float]:
    """Seconds of a process with bare imports, of the wall and of its processors."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.time()
    subprocess.run(
        [sys.executable, "-c", BARE], env=environment_of(threads), check=True
    )
    wall = time.time() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    user = after.ru_utime - before.ru_utime
    system = after.ru_stime - before.ru_stime
    return wall, user + system


def environment_of(threads: int) -> dict[str, str]:
    """The environment of a process that is timed."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def saved_models(folder: Path, options: argparse.Namespace) -> list[str]:
    """Two GPT-2s of random weights that are saved now."""
    from benchmarks.on_gpu.commands import FULL, saved_model

    size = FULL._replace(width=options.width, layers=options.layers)
    names = []
    for seed in (0, 1):
        model = saved_model(folder / f"gpt-{seed}", size, seed)
        names.append(str(model))
    return names


def words_of(folder: Path, options: argparse.Namespace) -> list[str]:
    """The words of a short fit."""
    import torch

    from benchmarks.on_gpu.commands import text_source

    models = options.models or saved_models(folder, options)
    place = "cpu"
    if torch.device(options.device).type == "cuda":
        place = "gpu"
    given = {
        "data.model_x": models[0],
        "data.model_y": models[1],
        "data.text.source": text_source(),
        "data.text.max_texts": "64",
        "data.sites": "1",
        "data.batch_size": "8",
        "data.max_length": "32",
        "model.aligners": "mlp",
        "trainer.accelerator": place,
        "trainer.limit_train_batches": "2",
        "trainer.limit_val_batches": "1",
    }
    words = []
    for name, value in given.items():
        words += [f"--{name}", value]
    return words


def spent(run: Run) -> Iterator[tuple[str, float, float]]:
    """Each step of a run, with its seconds of the wall and of processors."""
    last_wall = last_processors = 0.0
    for step in STEPS:
        wall, processors = run.get(step, (last_wall, last_processors))
        yield step, wall - last_wall, processors - last_processors
        last_wall = wall
        last_processors = processors


def add(
    figures: Figures,
    runs: Sequence[Run],
    before: Sequence[Run] = (),
    *,
    bare: Sequence[tuple[float, float]] = (),
) -> None:
    """Add the medians over the runs, step by step, and of the whole: of this checkout, and of the other if it ran.

    Args:
        figures: to which they are added.
        runs: of this checkout.
        before: of another checkout.
        bare: seconds of processes with bare imports, each of the wall and of its processors.
    """
    for name, each in (("", runs), ("before: ", before)):
        if each:
            add_steps(figures, name, each)
    if bare:
        add_bare(figures, bare, runs)
    whole = statistics.median(run[LAST][0] for run in runs)
    cores = os.cpu_count() or 1
    bar = 9
    if cores >= 16:
        bar = 6
    figures.add("until after the first step, seconds", whole, bar=bar)


def add_bare(
    figures: Figures, bare: Sequence[tuple[float, float]], runs: Sequence[Run]
) -> None:
    """Add what bare imports take, and how many times as much a processor works until after the first step."""
    walls, of_processors = zip(*bare, strict=True)
    processors = statistics.median(of_processors)
    whole = statistics.median(run[LAST][1] for run in runs)
    figures.add("bare imports, seconds", statistics.median(walls))
    figures.add("bare imports, seconds of processors", processors)
    figures.add("first step / bare imports, of processors", whole / processors)


def add_steps(figures: Figures, name: str, runs: Sequence[Run]) -> None:
    """Add the medians over the runs, step by step, and of processors until the end."""
    walls: dict[str, list[float]] = {step: [] for step in STEPS}
    of_processors: dict[str, list[float]] = {step: [] for step in STEPS}
    for run in runs:
        for step, wall, processors in spent(run):
            walls[step].append(wall)
            of_processors[step].append(processors)
    for step in STEPS:
        wall = statistics.median(walls[step])
        processors = statistics.median(of_processors[step])
        figures.add(f"{name}{step}, seconds", wall)
        figures.add(f"{name}{step}, seconds of processors", processors)
    whole = statistics.median(run[LAST][1] for run in runs)
    figures.add(f"{name}until after the first step, seconds of processors", whole)


def main() -> None:
    """Run the benchmark. What it imports, the processes that it times would have imported already."""
    from benchmarks.harness import Figures, parser

    arguments = parser(__doc__)
    arguments.set_defaults(rounds=3)
    arguments.add_argument("--width", type=int, default=768)
    arguments.add_argument("--layers", type=int, default=12)
    arguments.add_argument("--models", nargs=2, metavar="MODEL")
    arguments.add_argument("--before", type=Path, metavar="CHECKOUT")
    options = arguments.parse_args()
    figures = Figures(options.device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = words_of(folder, options)
        checkouts = [ROOT]
        if options.before:
            checkouts.append(options.before.resolve())
        runs: dict[Path, list[Run]] = {checkout: [] for checkout in checkouts}
        for checkout in checkouts:  # keeps what the command's options are
            timed(words, folder, options.threads, checkout)
        bare = []
        for _ in range(options.rounds):
            bare.append(timed_bare(options.threads))
            for checkout in checkouts:
                run = timed(words, folder, options.threads, checkout)
                runs[checkout].append(run)
    add(figures, runs.pop(ROOT), *runs.values(), bare=bare)
    load, _, _ = os.getloadavg()
    figures.add("load of the machine over the last minute", load)
    figures.write(options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fit"]:
        fit_to_first_step(sys.argv[2:])
    else:
        main()
