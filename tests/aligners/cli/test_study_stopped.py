"""Studies that are stopped, politely or by SIGKILL, whole or in part: they go on, and end with the same bits."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from tests.aligners.cli.small_study import LOCAL, MAPS, fits_in_parts, study_file, waiting_fits
from tests.cells import Inline
from tests.processes import Started
from tests.tiny import tiny_folder
from tests.world import World

from aligners.cli.table import study
from aligners.similarity.passes.saved import SavedPasses
from aligners.studies.study_folder import RESULT, StudyFolder

EACH_STEP = {"checkpoint": {"every_n_minutes": 1e-9}}
pytestmark = [
    pytest.mark.usefixtures("cells_here"),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc, by which processes are found"),
]


def wait_for_steps(begun: Started, folder: Path, lines: int, log: str = "run/metrics.csv") -> None:
    """Wait until a cell has logged so much."""
    begun.wait_until(lambda: any(file.read_bytes().count(b"\n") >= lines for file in folder.glob(f"cells/*/{log}")))


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
    """What every cell has found, seconds apart, and the bytes of its maps or its model."""
    this = StudyFolder(folder)
    files = [*folder.glob("cells/*/run/aligners.safetensors"), *folder.glob("cells/*/run/none/*/model.safetensors")]
    weights = {file.relative_to(folder).parts[1]: file.read_bytes() for file in files}
    rows = {number: [(table, row | {"seconds": 0}) for table, row in this.rows(number)] for number in this.cells}
    return {number: (rows[number], weights.get(number)) for number in this.cells}


@pytest.mark.slow
def test_a_study_whose_worker_is_killed_and_that_is_stopped_goes_on_from_its_checkpoint(
    world: World, tmp_path: Path
) -> None:
    options = {"model": {"aligners": MAPS}, "trainer": {"max_epochs": 3, "log_every_n_steps": 10}, **EACH_STEP}
    file = study_file(world, tmp_path, fit={"options": options}, inject=None)
    begun, folder = Started(tmp_path, "study", "run", file, around=waiting_fits), tmp_path / "runs" / "small"
    begun.wait_until(lambda: len(list(tmp_path.glob("waits-*"))) == 1)
    (worker,) = processes_of(b"forkserver", begun.process.pid)
    os.kill(worker, signal.SIGKILL)
    begun.wait_until(lambda: len(list(tmp_path.glob("waits-*"))) == 2)  # the next worker is at work
    begun.signal(signal.SIGINT)
    status, said = begun.end(), begun.said()
    assert status == 130, said
    assert "It goes on from where it was." in said
    assert "Stopped by Ctrl-C." in said.splitlines()
    (cell,) = StudyFolder(folder).cells
    assert StudyFolder(folder).state(cell) == "waiting"  # nobody holds its lock
    study(["run", file])
    study(["run", file, "--folder", str(tmp_path / "whole")])
    first, again = (
        pd.read_csv(next(place.glob("cells/*/run/metrics.csv")))["step"].min() for place in (tmp_path / "whole", folder)
    )
    assert again > first  # not from the start
    assert results(folder) == results(tmp_path / "whole")


@pytest.mark.slow
def test_a_fit_in_parts_that_is_killed_goes_on_within_its_part(world: World, tmp_path: Path) -> None:
    """In parts of as many sites as before, however much memory is free then."""
    model = {"model": {"aligners": MAPS}, "data": {"sites": "1,2:3"}}
    options = {**model, "trainer": {"max_epochs": 3}, **EACH_STEP}
    file = study_file(world, tmp_path, fit={"options": options}, inject=None)
    begun = Started(tmp_path, "study", "run", file, around=fits_in_parts)
    folder = tmp_path / "runs" / "small"
    begun.wait_until(lambda: list(folder.glob("cells/*/run/part-2-1/last.ckpt")))
    (worker,) = processes_of(b"forkserver", begun.process.pid)
    os.kill(worker, signal.SIGKILL)
    begun.wait_until(
        lambda: [file for file in folder.glob("cells/*/before/part-2-2/config.yaml") if file.stat().st_size]
    )
    (config,) = folder.glob("cells/*/before/part-2-2/config.yaml")
    assert yaml.safe_load(config.read_text())["ckpt_path"].endswith("before/part-2-1/last.ckpt")
    (tmp_path / "go_on").touch()
    assert begun.end() == 0, begun.said()
    (log,) = folder.glob("cells/*/log.txt")
    assert ("Part 1 of 2" in log.read_text(), "Part 2 of 2" in log.read_text()) == (False, True)
    assert not [*folder.glob("cells/*/before"), *folder.glob("cells/*/run/part-*")]  # nothing goes on from them
    with fits_in_parts():
        study(["run", file, "--folder", str(tmp_path / "whole")])
    assert results(folder) == results(tmp_path / "whole")


@pytest.mark.slow
def test_jobs_outlive_a_study_that_is_killed_and_the_next_one_waits_for_them(
    world: World,
    tmp_path: Path,
    cells_here: Inline,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of two cells, one is held by a job that lives, and one has not begun."""
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    third = str(tiny_folder(tmp_path / "third", seed=2))
    models = {"names": [world.model_x, world.model_y, third]}
    pairs = {"given": [[world.model_x, world.model_y], [world.model_x, third]]}
    options = {"model": {"aligners": MAPS}, "trainer": {"max_epochs": 12}, "data": {"sites": [1]}}
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
    monkeypatch.setattr("aligners.studies.schedule.time.sleep", go_on)  # when there is only that job to wait for
    study(["run", file])
    assert capsys.readouterr().out.count("another process that is making fit") == 1
    this = StudyFolder(folder)
    assert [this.state(cell) for cell in this.cells] == ["done", "done"]
    assert len(cells_here.calls) == 1  # nobody else has begun the other


@pytest.mark.slow
def test_a_cell_whose_jobs_time_is_over_goes_on_in_another_and_ends_with_the_same_bits(
    world: World, tmp_path: Path, cells_here: Inline
) -> None:
    """As by SLURM, within the first of two fine-tunings, which save when stopped; the second comes after it."""
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    finetune = {"options": {"trainer": {"max_epochs": 12, "log_every_n_steps": 1}}}
    fit = {"options": {"model": {"aligners": MAPS}, "trainer": {"max_epochs": 3}, "data": {"sites": [1]}}}
    work = {"fit": fit | {"stages": ["pretrained"]}, "inject": {"stages": ["pretrained"]}}
    file = study_file(world, tmp_path, stages=["pretrained", "finetuned"], finetune=finetune, **work)
    begun, folder = Started(tmp_path, "study", "run", file, *LOCAL), tmp_path / "runs" / "small"

    def at_the_third() -> bool:
        cells = folder.glob("cells/*")
        logs = (cell / "run" / "metrics.csv" for cell in cells if not (cell / RESULT).is_file())
        steps = [log.read_bytes().count(b"\n") for log in logs if log.is_file()]
        return len([*folder.glob(f"cells/*/{RESULT}")]) == 2 and max(steps, default=0) >= 10

    begun.wait_until(at_the_third)
    (job,) = processes_of(b"submitit.core._submit\0" + bytes(folder.resolve()))
    os.kill(job, signal.SIGUSR2)
    assert begun.end() == 0, begun.said()
    assert begun.said().count("It goes on from where it was.") == 1
    assert len([*folder.glob("slurm/*_submitted.pkl")]) == 5  # a job for each cell, and one more
    study(["run", file, "--folder", str(tmp_path / "whole")])
    assert len(cells_here.calls) == 4
    assert results(folder) == results(tmp_path / "whole")
    (resumed,) = folder.glob("cells/*/run/resumed-1/metrics.csv")
    first, again = (pd.read_csv(file)["step"].min() for file in (resumed.parents[1] / "metrics.csv", resumed))
    assert again > first  # not from the start


@pytest.mark.slow
def test_a_comparison_that_is_stopped_between_its_passes_goes_on_with_the_next(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save = SavedPasses.save

    def save_and_stop(self: SavedPasses, number: int, figures: Any) -> None:
        save(self, number, figures)
        monkeypatch.setattr(SavedPasses, "save", save)
        raise SystemExit(143)

    monkeypatch.setattr(SavedPasses, "save", save_and_stop)
    options = {"measures": ["cka", "svcca", "rsa"], "controls": True, "memory": 0.059}  # for four passes
    study(["run", study_file(world, tmp_path, fit=None, inject=None, similarity={"options": options})])
    (cell,) = (tmp_path / "runs" / "small" / "cells").iterdir()
    assert "Going on: 1 of 4 passes are finished." in caplog.text
    assert not (cell / "run" / "passes").exists()
    assert json.loads((cell / RESULT).read_text())["rows"]  # the same bits: tests/aligners/similarity/passes
