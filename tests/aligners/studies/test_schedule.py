from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aligners.studies.cells import Cell
from aligners.studies.folder import ERROR, RESULT, StudyFolder, locked
from aligners.studies.schedule import Schedule, missing
from tests.cells import Inline, begun, finish

TUNED = {"stages": ["finetuned"], "finetune": {}}


def kinds(folder: StudyFolder, cells: list[Cell]) -> list[str]:
    return sorted(cell.kind for cell in missing(folder, cells).values())


def test_each_cell_runs_once_and_after_those_that_it_needs(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path, **TUNED)
    ran: list[str] = []
    known = {cell.id: cell for cell in cells}

    def run(study: str, number: str) -> str:
        assert set(known[number].needs) <= set(ran)
        ran.append(number)
        return finish(study, number)

    Schedule(folder, cells, run, print).run(Inline(), 1)
    assert sorted(ran) == sorted(known)
    assert missing(folder, cells) == {}
    again = Schedule(folder, cells, run, print)
    again.run(Inline(), 1)
    assert len(ran) == len(cells)


def test_as_many_at_a_time_as_there_are_workers(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        Schedule(folder, cells, finish, print).run(threads, 2)
    assert missing(folder, cells) == {}


def test_a_failed_cell_stops_only_what_needs_it_until_it_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, cells = begun(tmp_path)
    wrong = next(cell.id for cell in cells if cell.kind == "fit")

    def run(study: str, number: str) -> str:
        if number == wrong:
            (folder.cell(number) / ERROR).write_text("Traceback\nValueError: no")
            return "failed"
        return finish(study, number)

    Schedule(folder, cells, run, print).run(Inline(), 1)
    assert kinds(folder, cells) == ["fit", "inject"]
    assert "fit m0 – m1, t, pretrained: failed" in capsys.readouterr().out
    Schedule(folder, cells, finish, print).run(Inline(), 1)
    assert kinds(folder, cells) == ["fit", "inject"]  # what has failed is not run by itself
    Schedule(folder, cells, finish, print).run(Inline(), 1, again=True)
    assert kinds(folder, cells) == []


def test_a_lost_worker_costs_its_cell_a_second_attempt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, cells = begun(tmp_path)
    lost = {cells[0].id: 1, cells[2].id: 5}  # times that its worker is lost

    def run(study: str, number: str) -> str:
        if lost.get(number, 0):
            lost[number] -= 1
            raise RuntimeError("killed")
        return finish(study, number)

    Schedule(folder, cells, run, print).run(Inline(), 1)
    assert folder.state(cells[0].id) == "done"
    assert folder.state(cells[2].id) == "failed"
    assert "lost 2 times" in (folder.cell(cells[2].id) / ERROR).read_text()
    assert "It is run once more" in capsys.readouterr().out


@pytest.mark.parametrize("finished", [True, False])
def test_a_cell_that_is_being_made_elsewhere_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    """As by a job that a command has submitted before it was killed. If that is killed, too, the cell runs here."""
    monkeypatch.setattr("aligners.studies.schedule.PAUSE", 0.01)
    folder, cells = begun(tmp_path)
    number, ran, said = cells[0].id, [], []
    elsewhere = locked(folder.cell(number))
    elsewhere.__enter__()

    def say(line: str) -> None:
        said.append(line)
        if line == "Another process is making fit m0 – m1, t, pretrained. It is waited for.":
            if finished:
                finish(str(tmp_path), number)
            elsewhere.__exit__(None, None, None)

    def run(study: str, cell: str) -> str:
        ran.append(cell)
        return finish(study, cell)

    Schedule(folder, cells, run, say).run(Inline(), 1)
    assert (number in ran) is not finished
    assert len(ran) == len(cells) - finished
    assert any("by another process" in line for line in said) is finished
    assert missing(folder, cells) == {}


def test_a_job_that_finds_its_cell_taken_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aligners.studies.schedule.PAUSE", 0.01)
    folder, cells = begun(tmp_path)
    taken = [cells[0].id]

    def run(study: str, number: str) -> str:
        if number in taken:  # locked when the job began
            taken.remove(number)
            return "busy"
        return finish(study, number)

    Schedule(folder, cells, run, print).run(Inline(), 1)
    assert missing(folder, cells) == {}


def test_a_result_that_arrives_meanwhile_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a job that an earlier command has submitted, and that was not at work yet when this one began."""
    monkeypatch.setattr("aligners.studies.schedule.PAUSE", 0.01)
    folder, cells = begun(tmp_path)
    inject = next(cell for cell in cells if cell.kind == "inject")
    ran: list[str] = []

    def run(study: str, number: str) -> str:
        if not ran:
            for other in (*inject.needs, inject.id):
                finish(study, other)
        ran.append(number)
        return finish(study, number)

    first = next(cell for cell in cells if cell.kind == "fit" and cell.id not in inject.needs)
    schedule = Schedule(folder, [first, *(cell for cell in cells if cell != first)], run, print)
    schedule.run(Inline(), 1)
    assert sorted(ran) == sorted({cell.id for cell in cells} - {*inject.needs, inject.id})
    assert schedule.ended.total() == len(cells)
    assert schedule.left() == 0


def test_what_a_cell_needs_is_made_again_if_it_is_gone(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path)
    Schedule(folder, cells, finish, print).run(Inline(), 1)
    inject = next(cell for cell in cells if cell.kind == "inject")
    (folder.cell(inject.id) / RESULT).unlink()
    assert kinds(folder, cells) == ["inject"]
    (folder.cell(inject.needs[0]) / "run" / "aligners.ckpt").unlink()
    assert kinds(folder, cells) == ["fit", "inject"]


def test_where_only_results_are_kept_maps_go_once_nothing_needs_them(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path, keep="results")
    held: list[int] = []

    def run(study: str, number: str) -> str:
        cell = next(cell for cell in cells if cell.id == number)
        assert all((folder.cell(need) / "run" / "aligners.ckpt").exists() for need in cell.needs)
        state = finish(study, number)
        held.append(len(list(tmp_path.glob("cells/*/run/aligners.ckpt"))))
        return state

    Schedule(folder, [cell for cell in cells if cell.kind != "none"], run, print).run(Inline(), 1)
    assert not [cell for cell in cells if cell.kind == "fit" and folder.leaves(cell)]
    assert missing(folder, cells) == {}


def test_maps_that_a_killed_command_has_left_go(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path, keep="results")
    inject = next(cell for cell in cells if cell.kind == "inject")
    for number in [cell.id for cell in cells if cell.kind == "fit"] + [inject.id]:
        finish(str(tmp_path), number)  # the last one by a job: nobody was there to remove its maps
    Schedule(folder, cells, finish, print).forget()
    assert [need for cell in cells for need in cell.needs if not folder.leaves(cell_of(cells, need))] == [*inject.needs]


def cell_of(cells: list[Cell], number: str) -> Cell:
    return next(cell for cell in cells if cell.id == number)


def test_the_time_left_is_that_of_the_kinds_so_far(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path)
    schedule = Schedule(folder, cells, finish, print)
    schedule._workers = 2
    schedule.seconds = {"fit": [10.0, 20.0]}
    schedule.ended["fit"] = 2
    assert schedule.left() is None
    schedule.seconds["inject"] = [4.0]
    schedule.ended["inject"] = 1
    assert schedule.left() == pytest.approx((1 * 15 + 2 * 4) / 2)
    schedule.ended["fit"] += 1  # by another process, or in vain
    assert schedule.left() == pytest.approx(2 * 4 / 2)
