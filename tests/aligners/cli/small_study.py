"""A study of two tiny models that tests change and run, here or in a process of its own."""

from __future__ import annotations

import os
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import yaml

from tests.processes import PROCESSES
from tests.world import World

__all__ = ["LOCAL", "MAPS", "started", "study_file"]

MAPS = {"linear": "Linear", "mlp": {"class_path": "MLP", "init_args": {"hidden": [8]}}}
LOCAL = ["--executor", "slurm", "--executor_options", '{"cluster": "local", "timeout_min": 5}']


def study_file(world: World, folder: Path, **changes: Any) -> str:
    """Write the study's file; `changes` are keys of it."""
    content = {
        "name": "small",
        "models": {"names": [world.model_x, world.model_y]},
        "tasks": {"t": {"text": {"source": world.fit, "held_out": world.test}}},
        "data": {"max_length": 60, "batch_size": 18},
        "fit": {"options": {"model": {"aligners": MAPS}, "trainer": {"max_epochs": 1}, "data": {"sites": [1]}}},
        "inject": {"options": {"closed_form": [], "fitting_errors": True}},
        "report": ["ren_table_4"],  # of figures there are tests enough
        **changes,
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(content))
    return str(folder / "study.yaml")


def started(folder: Path, *words: str, target: Any = None) -> ForkServerProcess:
    """Start `study.py` with these words in a process of its own, in a folder; what it prints is in screen.txt there.

    Args:
        folder: in which it works.
        words: of the command line.
        target: what it calls instead, with the words: a function of a module.
    """
    process = PROCESSES.Process(target=_run, args=(folder, list(words), target))
    process.start()
    return process


def _run(folder: Path, words: list[str], target: Any) -> None:
    os.chdir(folder)
    with (folder / "screen.txt").open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    sys.argv = ["study.py", *words]
    if target is not None:
        target(words)
        return
    from aligners.cli.table import study

    study()
