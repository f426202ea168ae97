import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.cells import Inline, begun, finish

from aligners.studies.cells import Cell
from aligners.studies.schedule import Pace, Schedule, missing
from aligners.studies.study_folder import ERROR, OPTIONS, RESULT, StudyFolder, locked

TUNED = {"stages": ["finetuned"], "finetune": {}}


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aligners.studies.schedule.PAUSE", 0.01)


def kinds(folder: StudyFolder, cells: list[Cell]) -> list[str]:
    return sorted(cell.kind for cell in missing(folder, cells).values())


def first(cells: list[Cell], kind: str) -> Cell:
    return next(cell for cell in cells if cell.kind == kind)


def go(
    folder: StudyFolder,
    cells: list[Cell],
    before: Callable[[str], str | None] = lambda number: None,
    say: Callable[[str], None] = print,
    **options: bool,
) -> list[str]:
    """Run what is missing; `before` may say how a cell ends instead of finishing. Returns the cells that ran."""
    ran = []

    def run(study: str, number: str) -> str:
        ran.append(number)
        return before(number) or finish(study, number)

    Schedule(folder, cells, run, say).run(Inline(), 1, **options)
    return ran


def test_each_cell_runs_once_and_after_those_that_it_needs(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path, **TUNED)
    needs = {cell.id: cell.needs for cell in cells}

    def done_before(number: str) -> None:
        assert all(folder.state(need) == "done" for need in needs[number])

    assert sorted(go(folder, cells, done_before)) == sorted(needs)
    assert missing(folder, cells) == {}
    assert go(folder, cells) == []


def test_as_many_at_a_time_as_there_are_workers(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path, models={"names": "m{seed}", "seeds": 4}, inject=None)
    running, counts, two = list[str](), list[int](), threading.Barrier(2)

    def run(study: str, number: str) -> str:
        running.append(number)
        two.wait(60)
        time.sleep(0.05)  # in which a third one would begin
        counts.append(len(running))
        running.remove(number)
        return finish(study, number)

    with ThreadPoolExecutor(9) as threads:
        Schedule(folder, cells, run, print).run(threads, 2)
    assert missing(folder, cells) == {}
    assert max(counts) == 2


def test_a_failed_cell_stops_only_what_needs_it_until_it_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, cells = begun(tmp_path)
    wrong = first(cells, "fit").id

    def fail(number: str) -> str | None:
        if number != wrong:
            return None
        (folder.cell(number) / ERROR).write_text("Traceback\nValueError: no")
        return "failed"

    go(folder, cells, fail)
    assert kinds(folder, cells) == ["fit", "inject"]
    assert "fit m0 – m1, t, pretrained: failed" in capsys.readouterr().out
    assert go(folder, cells) == []  # what has failed is not run by itself
    assert len(go(folder, cells, again=True)) == 2
    assert kinds(folder, cells) == []


def test_a_lost_worker_costs_its_cell_a_second_attempt_and_one_that_finds_it_taken_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, cells = begun(tmp_path)
    one, two, three = (cell.id for cell in cells[:5:2])
    ends = {one: ["lost"], two: ["lost"] * 2, three: ["busy"]}  # "busy": locked when the job began

    def end(number: str) -> str | None:
        state = ends[number].pop() if ends.get(number) else None
        if state == "lost":
            raise RuntimeError("killed")
        return state

    go(folder, cells, end)
    assert [folder.state(number) for number in (one, two, three)] == ["done", "failed", "done"]
    assert "lost 2 times" in (folder.cell(two) / ERROR).read_text()
    assert "It is run once more" in capsys.readouterr().out


def test_a_cell_that_gets_further_is_run_again_however_often_its_worker_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, cells = begun(tmp_path, inject=None)
    number, attempts = cells[0].id, iter([True, True, False, True, False, False])

    def end(cell: str) -> str | None:
        if cell != number:
            return None
        if next(attempts):
            last = folder.cell(number) / "run" / "last.ckpt"
            last.parent.mkdir(parents=True, exist_ok=True)
            last.write_bytes((last.read_bytes() if last.exists() else b"") + b"a step")
        raise RuntimeError("its time was over")

    assert go(folder, cells, end).count(number) == 6
    assert "before it got any further" in (folder.cell(number) / ERROR).read_text()
    said = capsys.readouterr().out
    assert (said.count("It goes on from where it was"), said.count("It is run once more")) == (3, 2)


@pytest.mark.parametrize("finished", [True, False])
def test_a_cell_that_is_being_made_elsewhere_is_waited_for(tmp_path: Path, finished: bool) -> None:
    """As by a job that a command has submitted before it was killed. If that is killed, too, the cell runs here."""
    folder, cells = begun(tmp_path)
    number, said = cells[0].id, []
    elsewhere = locked(folder.cell(number))
    elsewhere.__enter__()

    def say(line: str) -> None:
        said.append(line)
        if line == "Waiting for another process that is making fit m0 – m1, t, pretrained.":
            if finished:
                finish(str(tmp_path), number)
            elsewhere.__exit__(None, None, None)

    ran = go(folder, cells, say=say)
    assert (number in ran) is not finished
    assert len(ran) == len(cells) - finished
    assert any("by another process" in line for line in said) is finished
    assert missing(folder, cells) == {}


def test_a_result_that_arrives_meanwhile_is_taken(tmp_path: Path) -> None:
    """From a job that an earlier command has submitted, and that was not at work yet when this one began."""
    folder, cells = begun(tmp_path)
    inject = first(cells, "inject")
    theirs = {*inject.needs, inject.id}

    def arrive(number: str) -> None:
        for other in theirs:
            finish(str(tmp_path), other)

    ran = go(folder, sorted(cells, key=lambda cell: cell.id in theirs), arrive)
    assert sorted(ran) == sorted({cell.id for cell in cells} - theirs)
    assert missing(folder, cells) == {}


def test_what_a_cell_needs_is_made_again_if_it_is_gone(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path)
    go(folder, cells)
    inject = first(cells, "inject")
    (folder.cell(inject.id) / RESULT).unlink()
    assert kinds(folder, cells) == ["inject"]
    maps = folder.cell(inject.needs[0]) / "run" / "aligners.safetensors"
    maps = maps.rename(maps.with_suffix(".ckpt"))  # as the version before called it
    assert kinds(folder, cells) == ["inject"]
    maps.unlink()
    assert kinds(folder, cells) == ["fit", "inject"]


def test_where_only_results_are_kept_maps_go_once_nothing_needs_them(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path, keep="results")
    inject, fits = first(cells, "inject"), [cell for cell in cells if cell.kind == "fit"]
    for cell in [*fits, inject]:
        finish(str(tmp_path), cell.id)  # the last one by a job of a command that was killed: its maps were left
    Schedule(folder, cells, finish, print).forget()
    assert [cell.id for cell in fits if not folder.leaves(cell)] == [*inject.needs]
    needs = {cell.id: cell.needs for cell in cells}

    def maps_are_there(number: str) -> None:
        assert all((folder.cell(need) / "run" / "aligners.safetensors").exists() for need in needs[number])

    go(folder, cells, maps_are_there)
    assert not any(folder.leaves(cell) for cell in fits)
    assert missing(folder, cells) == {}


def test_the_time_left_is_what_cells_of_each_kind_took_so_far() -> None:
    pace = Pace()
    pace.add("fit", 40.0)
    pace.add("fit", 20.0)
    pace.add("fit", None)  # nobody knows
    assert pace.left(["fit", "fit", "inject"], 1) == ""  # of injections nothing is known yet
    pace.add("inject", 6.0)
    assert pace.left(["fit", "fit", "inject"], 1) == "about 66.0 s left"
    assert pace.left(["fit"] * 24, 4) == "about 3.0 min left"


def test_a_line_is_said_now_and_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = itertools.count(step=12.0)  # seconds pass from one look at the clock to the next
    monkeypatch.setattr("aligners.progress.time", SimpleNamespace(monotonic=lambda: next(now)))
    folder, cells = begun(tmp_path, models={"names": "m{seed}", "seeds": 4})
    for cell in cells:
        (folder.cell(cell.id) / OPTIONS).touch()
        os.utime(folder.cell(cell.id) / OPTIONS, (time.time() - 600.0,) * 2)
    finish(str(tmp_path), cells[0].id)
    Schedule(folder, cells, finish, print).run(Inline(), 1)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert [line.split("]")[0] for line in said] == ["[2/12", "[5/12", "[8/12", "[11/12", "[12/12"]
    assert said[1].endswith("0 running or queued, 0 failed, 7 waiting; about 70.0 min left")
