"""Stops commands by force and runs them again: what they leave has to be what an undisturbed run leaves, bit by bit.

`python -m tests.torture` takes minutes to an hour by its options and prints what it found; a test runs a few rounds.
The commands are the real ones on tiny models, each in a process of its own that was split off one which has imported
what takes long, so that signals meet the work and not the imports.
"""

import argparse
import hashlib
import itertools
import json
import os
import platform
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from matplotlib import image
from safetensors import safe_open
from tests.processes import Started
from tests.world import World, make_world

MAPS = {
    "linear": "Linear",
    "mlp": {"class_path": "MLP", "init_args": {"hidden": [8]}},
    "inn": {"class_path": "INN", "init_args": {"couplings": 2, "hidden": 8}},
}
QUIET = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
OFTEN = ["--checkpoint.every_n_minutes", "0.0005"]  # 30 ms: signals meet saving, too


@dataclass(frozen=True)
class Job:
    """A command, how it is run again, and what it leaves.

    Attributes:
        script: train or evaluate.
        words: of the command line, without `--run`.
        last: file of the run's folder from which another run goes on; None: it is run again from the beginning.
        same_folder: whether it goes on in the folder in which it was.
        outcome: what is compared: name -> digest, of a finished run's folder.
    """

    script: str
    words: list[str]
    outcome: Callable[[Path], dict[str, str]]
    last: str | None = None
    same_folder: bool = False


def jobs(world: World) -> dict[str, Job]:
    """One of each kind."""
    pair = ["--data.model_x", world.model_x, "--data.model_y", world.model_y]
    many = ["--data.models", json.dumps([world.model_x, world.model_y])]
    text = ["--data.text.source", world.fit, "--data.text.held_out", world.test, "--data.max_length", "60"]
    aligned = [*pair, *text, "--data.batch_size", "18", "--data.sites", "1,2:3", "--data.held_out_types", "0"]
    made = '["embedded-gpt:0:layers=1,width=16,steps=40", "embedded-mlm:0:layers=1,width=16,steps=40"]'
    return {
        "fit": Job(
            "train",
            ["fit", *aligned, "--model.aligners", json.dumps(MAPS), "--trainer.max_epochs", "2", *OFTEN, *QUIET],
            lambda folder: {"aligners.safetensors": digest(folder / "aligners.safetensors")},
            "last.ckpt",
        ),
        "stitch": Job(
            "train",
            [
                *("stitch", *many, *text, "--data.batch_size", "17", "--data.sites", "1:2,3", *OFTEN, *QUIET),
                *("--trainer.max_steps", "8", "--trainer.val_check_interval", "4"),
            ],
            lambda folder: {"layers": digest(folder / "stitching.safetensors"), **rows(folder / "stitching.json")},
            "last.ckpt",
        ),
        "finetune": Job(
            "train",
            [
                *("finetune", "--data.models", world.model_x, *text, "--data.batch_size", "32", "--seeds", "2"),
                *("--trainer.max_epochs", "1", *QUIET),
            ],
            lambda folder: {**files(folder, "model.safetensors"), **rows(folder / "finetuning.json")},
            same_folder=True,
        ),
        "inject": Job("evaluate", ["inject", *aligned, *QUIET], lambda folder: rows(folder / "report.json")),
        "similarity": Job(
            "evaluate",
            [
                *("similarity", *many, *text, "--measures", "[cka, svcca, rsa]", "--controls", "true", *QUIET),
                *("--memory", "0.059"),  # for four passes
            ],
            lambda folder: rows(folder / "similarity.json"),
            same_folder=True,
        ),
        "models": Job(
            "evaluate",
            ["similarity", "--data.models", made, *text, "--data.rows", "words", "--measures", "[cka]", *QUIET],
            lambda folder: {**rows(folder / "similarity.json"), **files(folder.parent / "cache")},
        ),
    }


# ---------------------------------------------------------------------- what is compared


def digest(path: Path) -> str:
    """Hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def rows(path: Path) -> dict[str, str]:
    """Hash of a report without what says where and when it was made."""
    tables = json.loads(path.read_text())
    del tables["meta"]
    for row in itertools.chain(*tables.values()):
        if isinstance(row, dict):
            row.pop("seconds", None)
    return {path.name: hashlib.sha256(json.dumps(tables).encode()).hexdigest()}


def files(folder: Path, pattern: str = "*") -> dict[str, str]:
    """Hash of every file below a folder but locks."""
    every = (path for path in sorted(folder.rglob(pattern)) if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(folder)): digest(path) for path in every}


def broken(folder: Path) -> list[str]:
    """Files under their final names that are not whole."""
    readers: dict[str, Callable[[Path], Any]] = {
        ".ckpt": lambda path: safe_open(path, "pt").keys(),
        ".safetensors": lambda path: safe_open(path, "pt").keys(),
        ".json": lambda path: json.loads(path.read_text()),
        ".png": image.imread,
        ".yaml": lambda path: yaml.safe_load(path.read_text())["data"],
        "last.ckpt": lambda path: torch.load(path, weights_only=True),
    }
    faults = []
    for path in folder.rglob("*"):
        read = readers.get(path.name) or readers.get(path.suffix)
        unfinished = any(part.endswith(".unfinished") for part in path.relative_to(folder).parts)
        if read is not None and not unfinished and "wandb" not in path.parts:
            try:
                read(path)
            except Exception as error:
                faults.append(f"{path}: {error!r}")
    return faults


def lies(started: Started) -> list[str]:
    """Files that a command called saved and that are not there or not whole."""
    saved = [Path(line.removeprefix("Saved ")) for line in started.said().splitlines() if line.startswith("Saved ")]
    return [str(path) for path in saved if not path.is_file() or broken(path.parent)]


@contextmanager
def limited_files(most: int | None) -> Iterator[None]:
    """Within it, no file of this process may be above a size, if there is one."""
    if most is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    yield


# ---------------------------------------------------------------------- torture


class Torture:
    """Runs jobs under force and counts what comes of it.

    Args:
        folder: for all runs.
        seed: of the moments at which signals come, and of the sizes of disks.
        wandb: mode of W&B.
    """

    def __init__(self, folder: Path, seed: int = 0, wandb: str = "offline") -> None:
        self.folder, self.draw, self.wandb = folder, random.Random(seed), wandb
        self.jobs = jobs(make_world(folder / "world"))
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._expected: dict[str, dict[str, str]] = {}
        self._seconds: dict[str, float] = {}

    def place(self, name: str) -> Path:
        """The folder of a run, in a new one."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder)) / "run"

    def begun(self, name: str, run: Path, *more: str, most: int | None = None) -> Started:
        """Start a job, with a cache beside the folder of its run. No file may have more than `most` bytes."""
        job, environment = self.jobs[name], {"ALIGNERS_CACHE": str(run.parent / "cache"), "WANDB_MODE": self.wandb}
        words, limited = [*job.words, "--run", str(run), *more], partial(limited_files, most)
        return Started(run.parent, job.script, *words, around=limited, environment=environment)

    def expected(self, name: str) -> dict[str, str]:
        """What an undisturbed run leaves."""
        if name not in self._expected:
            run, began = self.place(name), time.monotonic()
            started = self.begun(name, run)
            assert started.end() == 0, started.said()
            self._seconds[name] = time.monotonic() - began
            self._expected[name] = self.jobs[name].outcome(run)
            assert not list(run.rglob(".*.unfinished"))
            shutil.rmtree(run.parent)
        return self._expected[name]

    def stop(self, name: str, number: signal.Signals) -> bool:
        """Stop a job by a signal at a random moment, look at what is there, let it go on. Whether it was in time."""
        self.expected(name)
        run = self.place(name)
        started = self.begun(name, run)
        time.sleep(self.draw.uniform(0.05, 1.0) * self._seconds[name])
        started.signal(number)
        status = started.end()
        self._note(name, number.name if status != 0 else f"{number.name} after its end")
        allowed = {signal.SIGKILL: (-signal.SIGKILL, 0), signal.SIGTERM: (143, -signal.SIGTERM, 0)}[number]
        if status not in allowed:
            self._fault(f"{name}: {number.name} ended with {status}: {started.said()[-500:]}")
        self._finish(name, run, started, done=status == 0)
        return status != 0

    def fill(self, name: str) -> None:
        """Run a job where no file may have more than some size, then again where it may."""
        self.expected(name)
        run, most = self.place(name), int(2 ** self.draw.uniform(10, 17))
        started = self.begun(name, run, "--trainer.logger", "false", most=most)
        status = started.end()
        self._note(name, "disk was large enough" if status == 0 else "full disk")
        if status not in (0, 2) or "Traceback" in started.said():
            self._fault(f"{name}: a full disk ended with {status}: {started.said()[-1500:]}")
        self._finish(name, run, started, done=status == 0)

    def race(self, name: str, starts: int) -> None:
        """Start a job so many times at once with one folder: one of them has it, the others say so."""
        expected, run = self.expected(name), self.place(name)
        all_of_them = [self.begun(name, run) for _ in range(starts)]
        ends = [started.end() for started in all_of_them]
        self.counts[f"{name}: starts at once"] += starts
        self.counts[f"{name}: of these went on"] += ends.count(0)
        if sorted(ends) != [0, *[2] * (starts - 1)]:
            self._fault(f"{name}: {starts} starts at once ended with {ends}")
        if self.jobs[name].outcome(run) != expected:
            self._fault(f"{name}: started {starts} times at once, it left something else")
        shutil.rmtree(run.parent)

    def _finish(self, name: str, run: Path, started: Started, *, done: bool) -> None:
        """Look at what a job has left, let it end undisturbed, unless it has, and compare."""
        for fault in broken(run.parent):
            self._fault(f"{name}: half-written: {fault}")
        for lie in lies(started):
            self._fault(f"{name}: called saved: {lie}")
        job, finished, more = self.jobs[name], run, []
        if job.last is not None and (run / job.last).exists():
            more = ["--ckpt_path", str(run / job.last)]
            self._note(name, "went on")
        if not done:
            finished = run if job.same_folder else run.with_name("again")
            again = self.begun(name, finished, *more)
            if again.end() != 0:
                self._fault(f"{name}: run again, it ended with an error: {again.said()[-1500:]}")
                return
        outcome, expected = job.outcome(finished), self.expected(name)
        differing = [key for key in {**outcome, **expected} if outcome.get(key) != expected.get(key)]
        if differing:
            self._fault(f"{name}: {differing} are not those of a quiet run")
            return
        self._note(name, "ended bit-identical")
        for folder in {finished, run.parent / "cache", *([run] if more else [])}:
            for stray in folder.rglob(".*.unfinished"):
                self._fault(f"{name}: {stray} was left")
        shutil.rmtree(run.parent)

    def _note(self, name: str, what: str) -> None:
        self.counts[f"{name}: {what}"] += 1

    def _fault(self, what: str) -> None:
        self.faults.append(what)
        print(f"FAULT {what}", flush=True)


def main() -> None:
    """Torture at length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, count in {"kills": 50, "terms": 20, "disks": 10, "starts": 10, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--json", type=Path, help="write the counts there too")
    parser.add_argument("--folder", type=Path, help="work there; default: a temporary folder, removed at the end")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the server of processes, and so of all
    began, folder = time.monotonic(), options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    torture = Torture(folder, options.seed)
    names = list(torture.jobs)
    for number, wanted in ((signal.SIGKILL, options.kills), (signal.SIGTERM, options.terms)):
        for name in itertools.islice(itertools.cycle(names), wanted):
            while not torture.stop(name, number):
                pass
    for number in range(options.disks):
        torture.fill(names[number % len(names)])
    if options.starts:
        torture.race("fit", options.starts)
    minutes = round((time.monotonic() - began) / 60, 1)
    found = {**torture.counts, "faults": len(torture.faults), "minutes": minutes}
    print(json.dumps(found, indent=1))
    if options.json:
        about = {"machine": platform.platform(), "counts": found, "faults": torture.faults}
        options.json.write_text(json.dumps(about, indent=1))
    if options.folder is None and not torture.faults:
        shutil.rmtree(folder)
    sys.exit(bool(torture.faults))


if __name__ == "__main__":
    main()
