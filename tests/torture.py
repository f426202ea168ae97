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
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
            lambda folder: {"aligners.ckpt": digest(folder / "aligners.ckpt")},
            "last.ckpt",
        ),
        "stitch": Job(
            "train",
            [
                *("stitch", *many, *text, "--data.batch_size", "17", "--data.sites", "1:2,3", *OFTEN, *QUIET),
                *("--trainer.max_steps", "8", "--trainer.val_check_interval", "4", "--model.start_batches", "3"),
            ],
            lambda folder: {"stitching.ckpt": digest(folder / "stitching.ckpt"), **rows(folder / "stitching.json")},
            "last.ckpt",
        ),
        "finetune": Job(
            "train",
            [
                *("finetune", "--data.models", world.model_x, *text, "--data.batch_size", "32", "--seeds", "2"),
                *("--trainer.max_epochs", "1", *QUIET),
            ],
            classifiers,
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
            lambda folder: {**rows(folder / "similarity.json"), **everything(folder.parent / "cache")},
        ),
    }


# ---------------------------------------------------------------------- what is compared


def digest(path: Path) -> str:
    """Hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def rows(path: Path) -> dict[str, str]:
    """Hash of a report without what says where and when it was made."""
    found = json.loads(path.read_text())
    del found["meta"]
    for table in found.values():
        for row in table:
            if isinstance(row, dict):
                row.pop("seconds", None)
    return {path.name: hashlib.sha256(json.dumps(found).encode()).hexdigest()}


def everything(folder: Path) -> dict[str, str]:
    """Hash of every file below a folder but locks."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.endswith(".lock"))
    return {str(path.relative_to(folder)): digest(path) for path in files}


def classifiers(folder: Path) -> dict[str, str]:
    """The weights of each classifier and the figures of all."""
    weights = {str(path.relative_to(folder)): digest(path) for path in sorted(folder.rglob("model.safetensors"))}
    return {**weights, **rows(folder / "finetuning.json")}


def broken(folder: Path) -> list[str]:
    """Files under their final names that are not whole."""
    readers: dict[str, Callable[[Path], Any]] = {
        ".ckpt": read_checkpoint,
        ".safetensors": lambda path: safe_open(path, "pt").keys(),
        ".json": lambda path: json.loads(path.read_text()),
        ".png": image.imread,
        ".yaml": lambda path: yaml.safe_load(path.read_text())["data"],
    }
    found = []
    for path in folder.rglob("*"):
        unfinished = any(part.endswith(".unfinished") for part in path.relative_to(folder).parts)
        if path.suffix in readers and not unfinished and "wandb" not in path.parts:
            try:
                readers[path.suffix](path)
            except Exception as error:
                found.append(f"{path}: {error!r}")
    return found


def read_checkpoint(path: Path) -> Any:
    """A bank's file or a checkpoint of Lightning."""
    if path.name == "last.ckpt":
        return torch.load(path, weights_only=True)
    return safe_open(path, "pt").keys()


def strays(folder: Path) -> list[str]:
    """What was left half-written in the folder of a run that has ended well."""
    return [str(path) for path in folder.rglob(".*.unfinished")]


# ---------------------------------------------------------------------- processes


def begun(job: Job, run: Path, more: Sequence[str] = (), most: int | None = None, wandb: str = "offline") -> Started:
    """Start a job, with a cache beside the folder of its run.

    Args:
        job: which.
        run: folder of the run.
        more: further words.
        most: bytes that a file may have.
        wandb: mode of W&B.
    """
    environment = {"ALIGNERS_CACHE": str(run.parent / "cache"), "WANDB_MODE": wandb}
    words, limited = [*job.words, "--run", str(run), *more], partial(limited_files, most)
    return Started(run.parent, job.script, *words, around=limited, environment=environment)


@contextmanager
def limited_files(most: int | None) -> Iterator[None]:
    """Within it, no file of this process may be above a size, if there is one."""
    if most is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    yield


def lies(started: Started) -> list[str]:
    """Files that a command called saved and that are not there or not whole."""
    said = started.said().splitlines()
    saved = [Path(line.removeprefix("Saved ")) for line in said if line.startswith("Saved ")]
    return [str(path) for path in saved if not path.is_file() or broken(path.parent)]


# ---------------------------------------------------------------------- torture


class Torture:
    """Runs jobs under force and counts what comes of it.

    Args:
        folder: for all runs.
        seed: of the moments at which signals come, and of the sizes of disks.
        wandb: mode of W&B.
    """

    def __init__(self, folder: Path, seed: int = 0, wandb: str = "offline") -> None:
        self.folder, self.draw = folder, random.Random(seed)
        self._begun = partial(begun, wandb=wandb)
        self.jobs = jobs(make_world(folder / "world") if not (folder / "world").exists() else _world(folder / "world"))
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._expected: dict[str, dict[str, str]] = {}
        self._seconds: dict[str, float] = {}

    def place(self, name: str) -> Path:
        """A new folder."""
        place = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))
        return place

    def expected(self, name: str) -> dict[str, str]:
        """What an undisturbed run leaves."""
        if name not in self._expected:
            run, began = self.place(name) / "run", time.monotonic()
            started = self._begun(self.jobs[name], run)
            assert started.end() == 0, started.said()
            self._seconds[name] = time.monotonic() - began
            self._expected[name] = self.jobs[name].outcome(run)
            assert not strays(run), strays(run)
            shutil.rmtree(run.parent)
        return self._expected[name]

    def stop(self, name: str, number: signal.Signals) -> bool:
        """Stop a job by a signal at a random moment, look at what is there, let it go on. Whether it was in time."""
        self.expected(name)
        run = self.place(name) / "run"
        started = self._begun(self.jobs[name], run)
        time.sleep(self.draw.uniform(0.05, 1.0) * self._seconds[name])
        started.signal(number)
        status = started.end()
        self._note(name, number.name if status != 0 else f"{number.name} after its end")
        allowed = {signal.SIGKILL: (-signal.SIGKILL, 0), signal.SIGTERM: (143, -signal.SIGTERM, 0)}[number]
        if status not in allowed:
            self._fault(f"{name}: {number.name} ended with {status}: {started.said()[-500:]}")
        self._look(name, run.parent, started)
        self._finish(name, run, done=status == 0)
        return status != 0

    def fill(self, name: str) -> None:
        """Run a job where no file may have more than some size, then again where it may."""
        self.expected(name)
        run = self.place(name) / "run"
        started = self._begun(
            self.jobs[name], run, ["--trainer.logger", "false"], most=int(2 ** self.draw.uniform(10, 17))
        )
        status = started.end()
        self._note(name, "full disk")
        if status == 0:
            self._note(name, "disk was large enough")
        elif status != 2 or "Traceback" in started.said():
            self._fault(f"{name}: a full disk ended with {status}: {started.said()[-1500:]}")
        self._look(name, run.parent, started)
        self._finish(name, run, done=status == 0)

    def race(self, name: str, starts: int) -> None:
        """Start a job so many times at once with one folder: one of them has it, the others say so."""
        expected, run = self.expected(name), self.place(name) / "run"
        all_of_them = [self._begun(self.jobs[name], run) for _ in range(starts)]
        ends = [started.end() for started in all_of_them]
        self.counts[f"{name}: starts at once"] += starts
        self.counts[f"{name}: of these went on"] += ends.count(0)
        refused = [started for started, end in zip(all_of_them, ends, strict=True) if end == 2]
        if ends.count(0) != 1 or len(refused) != starts - 1:
            self._fault(f"{name}: {starts} starts at once ended with {ends}")
        if self.jobs[name].outcome(run) != expected:
            self._fault(f"{name}: started {starts} times at once, it left something else")
        shutil.rmtree(run.parent)

    def _finish(self, name: str, run: Path, *, done: bool) -> None:
        """Let the job end undisturbed, unless it has, and compare."""
        job, again, more = self.jobs[name], run.with_name("again"), []
        if job.same_folder:
            again = run
        if job.last is not None and (run / job.last).exists():
            more = ["--ckpt_path", str(run / job.last)]
            self._note(name, "went on")
        finished = run
        if not done:
            started = self._begun(job, again, more)
            if started.end() != 0:
                self._fault(f"{name}: run again, it ended with an error: {started.said()[-1500:]}")
                return
            finished = again
        found = job.outcome(finished)
        differing = [key for key, value in self.expected(name).items() if found.get(key) != value]
        if differing or set(found) != set(self.expected(name)):
            self._fault(f"{name}: {differing or set(found) ^ set(self.expected(name))} are not those of a quiet run")
            return
        self._note(name, "ended bit-identical")
        for each in {finished, run} if more else {finished}:
            for stray in strays(each):
                self._fault(f"{name}: {stray} was left")
        for other in run.parent.glob("cache/**/.*.unfinished"):
            self._fault(f"{name}: {other} was left")
        shutil.rmtree(run.parent)

    def _look(self, name: str, place: Path, started: Started) -> None:
        for fault in broken(place):
            self._fault(f"{name}: half-written: {fault}")
        for lie in lies(started):
            self._fault(f"{name}: called saved: {lie}")

    def _note(self, name: str, what: str) -> None:
        self.counts[f"{name}: {what}"] += 1

    def _fault(self, what: str) -> None:
        self.faults.append(what)
        print(f"FAULT {what}", flush=True)


def _world(folder: Path) -> World:
    return World(*(str(folder / name) for name in ("x", "y", "fit.csv", "test.csv")))


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
    found = {**torture.counts, "faults": len(torture.faults), "minutes": round((time.monotonic() - began) / 60, 1)}
    print(json.dumps(found, indent=1))
    if options.json:
        machine = subprocess.run(["uname", "-srm"], capture_output=True, text=True, check=True).stdout.strip()
        options.json.write_text(json.dumps({"machine": machine, "counts": found, "faults": torture.faults}, indent=1))
    if options.folder is None and not torture.faults:
        shutil.rmtree(folder)
    sys.exit(bool(torture.faults))


if __name__ == "__main__":
    main()
