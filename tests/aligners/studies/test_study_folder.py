import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tests.cells import NoCommands, begun, finish, study_of

from aligners.cli.study.study_results import failures, status_table, time_left
from aligners.cli.table import study
from aligners.errors import UserError
from aligners.studies.cells import Cell
from aligners.studies.collecting import tables
from aligners.studies.expansion import expand
from aligners.studies.study_folder import ERROR, OPTIONS, RESULT, StudyFolder, locked


def again(folder: StudyFolder, *, changed: bool = False, **changes: object) -> list[str]:
    study = study_of(**changes)
    return folder.begin(study, expand(study, NoCommands()), changed=changed)


def test_a_study_that_has_not_changed_goes_on_in_silence_and_more_cells_are_said(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path)
    assert again(folder) == again(folder, keep="results", report=["wu"]) == []
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


def test_another_study_and_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the folder of a study, with its study.yaml"):
        _ = StudyFolder(tmp_path).cells
    folder, _ = begun(tmp_path)
    with pytest.raises(ValueError, match="to hold the study other, but it holds small"):
        again(folder, name="other")


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
    assert file == str(tmp_path / "there" / "cells" / inject.needs[0] / "run" / "aligners.safetensors")


# ---------------------------------------------------------------------- what is collected from it


KEYS = ["cell", "kind", "task", "stage", "model_x", "model_y", "stage_x", "stage_y"]
KEYS += ["tuned_x", "tuned_y", "group_x", "group_y"]
MODELS = {"names": ["a", "b", "c"], "groups": {"first": ["a"], "second": ["b", "c"]}}


def leave(folder: StudyFolder, cell: Cell, **content: Any) -> None:
    finish(str(folder.path), cell.id, json.dumps({"kind": cell.kind, "meta": {}, **content}))


def test_rows_say_what_they_are_about_in_the_studys_words(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path, models=MODELS, stages=["finetuned"], finetune={}, inject=None)
    fit = next(cell for cell in cells if cell.kind == "fit")
    x, y = (model["path"] for model in folder.described(fit.id)["models"])
    assert x != y
    rows = [{"model_x": x, "model_y": y, "fvu": 0.5}, {"model_x": y, "model_y": x, "fvu": 0.25}]
    leave(folder, fit, rows=rows)
    tuned = next(cell for cell in cells if cell.kind == "finetune")
    leave(folder, tuned, rows=[{"base": "a", "score": 0.9, "kind": "none"}], meta={"majority_score": 0.5})
    found = tables(folder)
    assert list(found["fit"].columns) == [*KEYS, "fvu"]
    first, second = found["fit"].to_dict("records")
    ends = ["finetuned", "a", "b", "finetuned", "finetuned", "t", "t", "first", "second"]
    assert [*first.values()] == [fit.id, "fit", "t", *ends, 0.5]
    assert (second["model_x"], second["model_y"], second["group_x"]) == ("b", "a", "second")
    (row,) = found["finetune"].to_dict("records")
    assert (row["model_x"], row["model_y"], row["stage"]) == ("a", None, "pretrained")
    assert (row["kind"], row["condition"], row["majority_score"]) == ("finetune", "none", 0.5)


def test_rows_across_stages_have_none_of_their_own(tmp_path: Path) -> None:
    stages = {"stages": ["pretrained", "finetuned"], "finetune": {}, "similarity": {"across_stages": True}}
    folder, cells = begun(tmp_path, models=MODELS, fit=None, inject=None, **stages)
    cell = next(cell for cell in cells if cell.kind == "similarity")
    models = folder.described(cell.id)["models"]
    old, new = (model["path"] for model in models if model["name"] == "a")
    rows = [{"model_x": old, "model_y": new, "value": 1.0}]
    layers = [{"model": new, "layer": 1, "nuclear_norm": 2.0}]
    leave(folder, cell, rows=rows, layers=layers, findings=["words"], meta={"rows": "cls"})
    found = tables(folder)
    assert set(found) == {"similarity", "similarity_layers"}
    (row,) = found["similarity"].to_dict("records")
    assert (row["stage"], row["stage_x"], row["stage_y"], row["rows"]) == (None, "pretrained", "finetuned", "cls")
    assert (row["model_x"], row["model_y"]) == ("a", "a")
    (layer,) = found["similarity_layers"].to_dict("records")
    assert (layer["model"], layer["stage"], layer["group"]) == ("a", "finetuned", "first")


def test_a_report_reads_no_more_of_the_similarities_than_it_shows(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path, models=MODELS, fit=None, inject=None, similarity={})
    cell = next(cell for cell in cells if cell.kind == "similarity")
    x, y = (model["path"] for model in folder.described(cell.id)["models"][:2])
    of_raw = {"model_x": x, "model_y": y, "features": "raw", "value": 0.5, "low": 0.25, "held_out": 0.5}
    leave(folder, cell, rows=[of_raw, of_raw | {"features": "standardised"}])
    found = tables(folder)["similarity"]
    whole = pd.read_parquet(folder.path / "tables" / "similarity.parquet")
    assert list(whole["features"]) == ["raw", "standardised"]
    assert list(found["features"]) == ["raw"]
    assert set(whole.columns) - set(found.columns) == {"cell", "kind", "low"}


def test_status_counts_and_names_what_failed(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path)
    finish(str(tmp_path), cells[0].id)
    failed = next(cell for cell in cells if cell.kind == "inject")
    (folder.cell(failed.id) / "error.txt").write_text("Traceback\n  ...\nValueError: no room\n\n")
    (line,) = failures(folder)
    assert line.startswith("inject m0 – m1, t: ValueError: no room\n")
    assert failed.id in line
    counts = [column.cells for column in status_table(folder).columns]
    assert counts == [["fit", "inject"], ["1", ""], ["", ""], ["2", "2"], ["", "1"]]


def test_status_says_how_long_the_rest_takes_on_as_many_workers_as_are_at_work(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path)
    assert time_left(folder) == []
    for cell in cells:
        if cell.kind == "inject" and cell.id == cells[-1].id:
            finish(str(tmp_path), cell.id)
    for number in [cell.id for cell in cells if folder.ended(cell.id)] + [cells[0].id]:
        finish(str(tmp_path), number)
        for name, when in ((OPTIONS, 1e9), (RESULT, 1e9 + 300)):
            (folder.cell(number) / name).touch()
            os.utime(folder.cell(number) / name, (when, when))
    assert time_left(folder) == ["About 20.0 min left on 1 worker."]
    with locked(folder.cell(cells[2].id)), locked(folder.cell(cells[4].id)):
        assert time_left(folder) == ["About 10.0 min left on 2 workers."]


@pytest.mark.parametrize(
    "content", [None, b"", b"[1]", b'{"kind": 3}', b"\xff", b"a: !!python/object/apply:os.getcwd []"]
)
@pytest.mark.parametrize("name", ["study.yaml", "plan.json", "cell.json", "result.json"])
def test_an_incomplete_or_edited_folder_is_refused_with_the_file(
    tmp_path: Path, name: str, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, cells = begun(tmp_path)
    finish(str(tmp_path), cells[0].id)
    file = tmp_path / name if name in ("study.yaml", "plan.json") else folder.cell(cells[0].id) / name
    file.unlink() if content is None else file.write_bytes(content)
    if name == "result.json" and content in (None, b'{"kind": 3}'):
        return  # it is not done; or has no rows
    said = {None: "study.yaml", b'{"kind": 3}': "kind/cell.json"}.get(content, name) if name == "plan.json" else name
    with pytest.raises(UserError, match=rf"{said}.*({'' if content is None else 'study.py run'})"):
        study(["collect" if name == "result.json" else "status", str(tmp_path)])


def test_somebodys_cells_are_written_as_the_study_has_them_and_links_are_refused(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path)
    place = folder.cell(cells[0].id) / "cell.json"
    before = place.read_text()
    place.write_text(before.replace('"options": {', '"options": {"checkpoint": {"folder": "/elsewhere"},', 1))
    again(folder)
    assert place.read_text() == before
    (tmp_path / "mine").mkdir()
    (folder.cell(cells[0].id) / "run").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="to hold its own files, but"):
        again(folder)


def test_ids_of_cells_lead_nowhere_else(tmp_path: Path) -> None:
    folder, _ = begun(tmp_path)
    (tmp_path / "plan.json").write_text('{"../../elsewhere": 1.0}')
    with pytest.raises(UserError, match="to be a name as of a file"):
        _ = folder.cells
