"""Studies that are stopped, politely or by SIGKILL, whole or in part: they go on, and end with the same bits."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from aligners.cli.study import run as running
from aligners.cli.table import study
from aligners.similarity.passes.saved import SavedPasses
from aligners.studies.folder import RESULT, StudyFolder
from tests.aligners.cli.small_study import LOCAL, MAPS, forked_workers, study_file
from tests.cells import Inline
from tests.processes import Started
from tests.tiny import tiny_folder
from tests.world import World

OFTEN = {"checkpoint": {"every_n_minutes": 1e-3}}
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc, by which processes are found")


class Recorded(Inline):
    """Runs what is submitted in this process, at once, and keeps which cells these were."""

    def __init__(self) -> None:
        self.cells: list[str] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.cells.append(args[1])
        return super().submit(fn, *args, **kwargs)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorded:
    """Cells of studies in this process run here, one after another."""
    executor = Recorded()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(running, "make_executor", lambda *_: executor)
    return executor


def wait_for_steps(begun: Started, folder: Path, lines: int) -> None:
    """Wait until a cell has logged so much."""
    logs = "cells/*/run/metrics.csv"
    begun.wait_until(lambda: any(log.read_bytes().count(b"\n") >= lines for log in folder.glob(logs)))


def processes_of(words: bytes, parent: int | None = None) -> list[int]:
    """The processes with these words in their command lines, of one parent."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            above = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if words in (place / "cmdline").read_bytes() and parent in (None, above):
                found.append(int(place.name))
    return found


def results(folder: Path) -> dict[str, Any]:
    """What every cell has found, and the bytes of its maps."""
    this = StudyFolder(folder)
    maps = {file.parts[-3]: file.read_bytes() for file in folder.glob("cells/*/run/aligners.ckpt")}
    return {number: (this.result(number)["rows"], maps.get(number)) for number in this.cells}


@pytest.mark.parametrize(("executor", "number"), [([], signal.SIGINT), (LOCAL, signal.SIGTERM)], ids=["here", "jobs"])
def test_a_study_that_is_stopped_ends_its_workers_and_jobs_and_goes_on(
    world: World, tmp_path: Path, executor: list[str], number: signal.Signals
) -> None:
    if executor:
        pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    slow = {"options": {"model": {"aligners": MAPS}, "trainer": {"max_epochs": 100_000}}}
    file = study_file(world, tmp_path, fit=slow, inject=None)
    begun = Started(tmp_path, "study", "run", file, *executor, around=forked_workers)
    wait_for_steps(begun, tmp_path / "runs" / "small", 1)
    begun.signal(number)
    status, said = begun.end(), begun.said()
    assert status == {signal.SIGTERM: 143, signal.SIGINT: 130}[number], said
    assert {signal.SIGTERM: "Stopped by SIGTERM.", signal.SIGINT: "Stopped by Ctrl-C."}[number] in said.splitlines()
    folder = StudyFolder(tmp_path / "runs" / "small")
    assert [folder.state(cell) for cell in folder.cells] == ["waiting"]  # nobody holds its lock


def test_a_cell_whose_worker_is_killed_goes_on_from_its_checkpoint(world: World, tmp_path: Path) -> None:
    options = {"model": {"aligners": MAPS}, "trainer": {"max_epochs": 12, "log_every_n_steps": 10}, **OFTEN}
    file = study_file(world, tmp_path, fit={"options": options}, inject=None)
    begun, folder = Started(tmp_path, "study", "run", file, around=forked_workers), tmp_path / "runs" / "small"
    wait_for_steps(begun, folder, 5)
    (worker,) = processes_of(b"forkserver", begun.process.pid)
    os.kill(worker, signal.SIGKILL)
    status, said = begun.end(), begun.said()
    assert status == 0, said
    assert "It is run once more." in said  # it was killed before its end
    study(["run", file, "--folder", str(tmp_path / "whole")])
    first, again = (
        pd.read_csv(next(place.glob("cells/*/run/metrics.csv")))["step"].min() for place in (tmp_path / "whole", folder)
    )
    assert again > first  # not from the start
    assert results(folder) == results(tmp_path / "whole")


def test_jobs_outlive_a_study_that_is_killed_and_the_next_one_waits_for_them(
    world: World, tmp_path: Path, here: Recorded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two cells, one is held by a job that lives, and one has not begun."""
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    third = str(tiny_folder(tmp_path / "third", seed=2))
    models = {"names": [world.model_x, world.model_y, third]}
    pairs = {"given": [[world.model_x, world.model_y], [world.model_x, third]]}
    options = {"model": {"aligners": MAPS}, "trainer": {"max_epochs": 20}, "data": {"sites": [1]}, **OFTEN}
    fit = {"options": options, "pairs_at_once": 1}
    file = study_file(world, tmp_path, models=models, pairs=pairs, fit=fit, inject=None)
    begun = Started(tmp_path, "study", "run", file, *LOCAL)
    folder = tmp_path / "runs" / "small"
    wait_for_steps(begun, folder, 2)
    (job,) = processes_of(b"submitit.core._submit\0" + bytes(folder.resolve()))
    os.kill(job, signal.SIGSTOP)  # at work, for as long as this test likes
    begun.signal(signal.SIGKILL)
    begun.end()

    def go_on(_: float) -> None:
        os.kill(job, signal.SIGCONT)
        real_sleep(0.1)

    real_sleep = time.sleep
    monkeypatch.setattr(
        "aligners.studies.schedule.time.sleep", go_on
    )  # when there is nothing left to do but to wait for it
    study(["run", file])
    assert capsys.readouterr().out.count("Another process is making fit") == 1
    this = StudyFolder(folder)
    assert [this.state(cell) for cell in this.cells] == ["done", "done"]
    assert len(here.cells) == 1  # nobody else has begun the other


@contextmanager
def killed_after_a_pass() -> Iterator[None]:
    """Within it, cells run in this process, which is killed when the first pass of a comparison is finished."""
    save = SavedPasses.save

    def save_and_die(self: SavedPasses, number: int, figures: Any) -> None:
        save(self, number, figures)
        os.kill(os.getpid(), signal.SIGKILL)

    SavedPasses.save = save_and_die  # type: ignore[method-assign]
    running.make_executor = lambda *_: Inline()
    yield


def test_a_comparison_that_is_killed_between_its_passes_goes_on_with_the_next(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"measures": ["cka", "svcca", "rsa"], "controls": True, "memory": 0.059}  # for four passes
    file = study_file(world, tmp_path, fit=None, inject=None, similarity={"options": options})
    killed = Started(tmp_path, "study", "run", file, around=killed_after_a_pass)
    assert killed.end() == -signal.SIGKILL, killed.said()
    study(["run", file])
    (cell,) = (tmp_path / "runs" / "small" / "cells").iterdir()
    assert "Going on: 1 of 4 passes are finished." in caplog.text
    assert not (cell / "run" / "passes").exists()
    assert json.loads((cell / RESULT).read_text())["rows"]  # the same bits: tests/aligners/similarity/passes
