from pathlib import Path

import pytest

from aligners.studies.cells import expand
from aligners.studies.folder import ERROR, StudyFolder, locked
from tests.cells import NoCommands, begun, finish, study_of


def again(folder: StudyFolder, *, changed: bool = False, **changes: object) -> list[str]:
    study = study_of(**changes)
    return folder.begin(study, expand(study, NoCommands()), changed=changed)


def test_a_study_that_has_not_changed_goes_on_in_silence(tmp_path: Path) -> None:
    folder, _ = begun(tmp_path)
    assert again(folder) == []
    assert again(folder, keep="results", report=["wu"]) == []


def test_more_cells_are_said_and_done(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path)
    finish(str(tmp_path), cells[0].id)
    said = again(folder, tasks={"t": {}, "u": {"text": 1}})
    assert said == ['The study has changed: `tasks.u` was null and is {"text": 1}.', "New: 3 fit, 3 inject."]
    assert folder.state(cells[0].id) == "done"


def test_a_change_that_sets_results_aside_is_refused_until_it_is_confirmed(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path)
    finish(str(tmp_path), cells[0].id)
    with pytest.raises(ValueError, match=r"`data.rows` was null and is \"mean\".*No longer part of it: 3 fit, 3 inject "
                       r"\(1 done\).*`--changed true`"):  # fmt: skip
        again(folder, data={"rows": "mean"})
    assert folder.cells == [cell.id for cell in cells]
    assert again(folder, changed=True, data={"rows": "mean"})
    assert cells[0].id not in folder.cells
    assert again(folder, changed=True) != []  # and back: its result is still there
    assert folder.state(cells[0].id) == "done"


def test_another_study_is_refused(tmp_path: Path) -> None:
    folder, _ = begun(tmp_path)
    with pytest.raises(ValueError, match="to hold the study other, but it holds small"):
        again(folder, name="other")


def test_no_folder_of_a_study(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the folder of a study, with its study.yaml"):
        _ = StudyFolder(tmp_path).cells


def test_two_commands_do_not_run_one_study(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path / "new")
    with folder.only_one(), pytest.raises(ValueError, match="no other command to run this study"), folder.only_one():
        pass
    with folder.only_one():
        pass


def test_what_killed_workers_left_goes_but_not_what_others_are_writing(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path)
    mine, theirs = (folder.cell(cell.id) / "run" / ".result.json.unfinished" for cell in cells[:2])
    for file in (mine, theirs):
        file.parent.mkdir()
        file.touch()
    with locked(mine.parents[1]):
        pass  # it has been run
    with locked(theirs.parents[1]):
        again(folder)
    assert not mine.exists()
    assert theirs.exists()


def test_states(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path)
    number = cells[0].id
    assert folder.state(number) == "waiting"
    with locked(folder.cell(number)) as free:
        assert free
        assert folder.state(number) == "running"
    (folder.cell(number) / ERROR).write_text("no")
    assert folder.state(number) == "failed"
    finish(str(tmp_path), number)
    assert folder.state(number) == "done"


def test_a_studys_folder_can_be_moved(tmp_path: Path) -> None:
    _, cells = begun(tmp_path / "here")
    inject = next(cell for cell in cells if cell.kind == "inject")
    (tmp_path / "here").rename(tmp_path / "there")
    moved = StudyFolder(tmp_path / "there")
    (file,) = moved.described(inject.id)["options"]["checkpoints"]
    assert file == str(tmp_path / "there" / "cells" / inject.needs[0] / "run" / "aligners.ckpt")
