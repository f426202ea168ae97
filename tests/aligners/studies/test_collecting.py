import json
from pathlib import Path
from typing import Any

import pandas as pd

from aligners.cli.study.folder import failures, status_table
from aligners.studies.cells import Cell
from aligners.studies.collecting import collect, tables
from aligners.studies.folder import StudyFolder
from tests.cells import begun, finish

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
    about = {"cell": fit.id, "kind": "fit", "task": "t", "stage": "finetuned", "fvu": 0.5}
    assert first == {
        **about, "model_x": "a", "model_y": "b", "stage_x": "finetuned", "stage_y": "finetuned", "tuned_x": "t",
        "tuned_y": "t", "group_x": "first", "group_y": "second",
    }  # fmt: skip
    assert (second["model_x"], second["model_y"], second["group_x"]) == ("b", "a", "second")
    (row,) = found["finetune"].to_dict("records")
    assert (row["model_x"], row["model_y"], row["stage"]) == ("a", None, "pretrained")
    assert (row["kind"], row["condition"], row["majority_score"]) == ("finetune", "none", 0.5)


def test_rows_across_stages_have_none_of_their_own(tmp_path: Path) -> None:
    stages = {"stages": ["pretrained", "finetuned"], "finetune": {}, "similarity": {"across_stages": True}}
    folder, cells = begun(tmp_path, models=MODELS, fit=None, inject=None, **stages)
    cell = next(cell for cell in cells if cell.kind == "similarity")
    models = folder.described(cell.id)["models"]
    old, new = (
        next(model["path"] for model in models if (model["name"], model["stage"]) == ("a", stage))
        for stage in ("pretrained", "finetuned")
    )
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


def test_only_collect_writes_the_tables(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path)
    leave(folder, cells[0], rows=[{"model_x": "m0", "model_y": "m1", "fvu": 0.5}])
    assert not (tmp_path / "tables").exists()
    assert list(collect(folder)) == ["fit"]
    frame = pd.read_parquet(tmp_path / "tables" / "fit.parquet")
    pd.testing.assert_frame_equal(
        frame[["model_x", "fvu"]], pd.read_csv(tmp_path / "tables" / "fit.csv")[["model_x", "fvu"]], check_dtype=False
    )
    leave(folder, cells[2], rows=[{"model_x": "m0", "model_y": "m2", "fvu": 0.6}])
    collect(folder)
    assert len(pd.read_parquet(tmp_path / "tables" / "fit.parquet")) == 2


def test_status_counts_and_names_what_failed(tmp_path: Path) -> None:
    folder, cells = begun(tmp_path)
    finish(str(tmp_path), cells[0].id)
    failed = next(cell for cell in cells if cell.kind == "inject")
    (folder.cell(failed.id) / "error.txt").write_text("Traceback\n  ...\nValueError: no room\n")
    (line,) = failures(folder)
    assert line.startswith("inject m0 – m1, t: ValueError: no room\n")
    assert failed.id in line
    counts = [list(column.cells) for column in status_table(folder).columns]
    assert counts == [["fit", "inject"], ["1", ""], ["", ""], ["2", "2"], ["", "1"]]
