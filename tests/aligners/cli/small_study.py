"""A study of two tiny models that tests change and run."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from tests.world import World

from aligners.studies.study_folder import StudyFolder

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
        "report": ["errors"],  # of figures there are tests enough
        **changes,
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(content))
    return str(folder / "study.yaml")


def kinds(folder: Path) -> list[str]:
    """The kinds of a study's cells, in alphabetical order."""
    return sorted(StudyFolder(folder).described(number)["kind"] for number in StudyFolder(folder).cells)


@contextmanager
def forked_workers() -> Iterator[None]:
    """Within it, workers of this process's studies are split off it, as all is imported, rather than started anew."""
    from aligners.studies import executors  # of the installation that runs

    begin, context = executors._begin_worker, multiprocessing.get_context

    def begin_forked(*given: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):  # those of a new process
            signal.signal(number, signal.SIG_DFL)
        begin(*given)

    executors._begin_worker = begin_forked
    multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)  # type: ignore[assignment]
    yield


@contextmanager
def waiting_fits(pattern: str = "cells/*/run") -> Iterator[None]:
    """Within it, workers are split off this process, and their fits wait at step 15 for a signal, or the file `go_on`.

    One that waits leaves a file `waits-PID`.

    Args:
        pattern: of the folder below the study's in which a fit waits.
    """
    from aligners.callbacks.checkpoint import _Save

    end_batch = _Save.on_train_batch_end

    def end_batch_and_wait(self: _Save, trainer: Any, *given: Any, **named: Any) -> None:
        end_batch(self, trainer, *given, **named)
        if trainer.global_step >= 15 and list(Path("runs/small").glob(pattern)):
            Path(f"waits-{os.getpid()}").touch()
            while self._interruption._received is None and not Path("go_on").exists():
                time.sleep(0.01)

    _Save.on_train_batch_end = end_batch_and_wait  # type: ignore[method-assign]
    with forked_workers():
        yield
    _Save.on_train_batch_end = end_batch  # type: ignore[method-assign]


@contextmanager
def fits_in_parts() -> Iterator[None]:
    """Within it, memory is free for one site in a first attempt alone; workers wait in its second part, as above."""
    from aligners.cli.train import fit

    def begun_in_parts(sites: int, *_: int) -> int:
        return sites if list(Path("runs/small/cells").glob("*/before")) else 1

    real = fit.sites_at_once
    fit.sites_at_once = begun_in_parts
    with waiting_fits("cells/*/run/part-2-*"):
        yield
    fit.sites_at_once = real
