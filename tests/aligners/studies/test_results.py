"""Results are read row by row, and tables written part by part: the same as from all rows at once."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from aligners.studies import collecting, results
from aligners.studies.collecting import collect
from aligners.studies.folder import StudyFolder
from tests.cells import begun, finish

RESULT: dict[str, Any] = {
    "kind": "fit", "seconds": 12.25, "meta": {"text": {"source": "a \"}] {"}, "empty": []},
    "rows": [{"name": "ä, [1]", "n": 12345678901, "value": -1.5e-7}, {"name": None, "deep": {"a": [1, {}]}}],
    "none": [], "findings": ["In words: { }."], "layers": [{"layer": 1}], "last": 7,
}  # fmt: skip


@pytest.mark.parametrize("block", [1, 7, 2**20])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_result_is_read_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, indent: int | None
) -> None:
    monkeypatch.setattr(results, "BLOCK", block)
    (tmp_path / "result.json").write_text(json.dumps(RESULT, indent=indent))
    assert results.about(tmp_path / "result.json") == {name: RESULT[name] for name in ("kind", "seconds", "meta")}
    rows = [("rows", row) for row in RESULT["rows"]] + [("layers", {"layer": 1})]
    assert list(results.rows(tmp_path / "result.json")) == rows
    (tmp_path / "result.json").write_text('{"rows": [{"n": 1}, {"n"')
    with pytest.raises(json.JSONDecodeError):
        list(results.rows(tmp_path / "result.json"))


ROWS: list[dict[str, Any]] = [
    {"word": "a", "whole": 1, "some": 1, "mixed": 1, "flag": True, "flags": True, "no": None, "odd": None},
    {"word": "b, \"c\"", "whole": 2, "some": None, "mixed": 2, "flag": False, "flags": None, "no": None, "odd": None},
    {"word": None, "whole": 3, "some": 3, "mixed": 2.5, "flag": True, "flags": False, "no": None},
    {"word": "d", "whole": 4, "mixed": None, "flag": True, "later": 1, "no": None, "odd": None},
    {"whole": 5, "mixed": 1, "flag": False, "later": 2, "words": "x", "no": None, "odd": None},
    {"whole": 6, "mixed": 1, "flag": False, "no": None},
    {"whole": 7, "mixed": 1, "flag": False, "no": None, "some": 1e-300},
]  # fmt: skip


NAMES = {"stage": "pretrained", "tuned": None, "group": None}  # of a model, in a table


@pytest.mark.parametrize("part", [1, 2, 3, 100])
def test_a_table_in_parts_is_that_of_all_rows_to_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr(collecting, "PART", part)
    folder, (cell, *_) = begun(tmp_path / "study", inject=None)
    x, y = (model["path"] for model in folder.described(cell.id)["models"])
    rows = [{"model_x": x, "model_y": y, **row} for row in ROWS]
    finish(str(folder.path), cell.id, json.dumps({"meta": {}, "rows": rows}))
    monkeypatch.setattr(StudyFolder, "result", None)  # not to be called: it has all rows at once
    (file,) = collect(folder).values()
    stages = {f"{name}_{side}": value for name, value in NAMES.items() for side in "xy"}
    about = {"cell": cell.id, "kind": "fit", "task": "t", "stage": "pretrained", "model_x": x, "model_y": y, **stages}
    whole = pd.DataFrame([about | row for row in rows])
    whole.to_parquet(tmp_path / "whole.parquet", index=False)
    whole.to_csv(tmp_path / "whole.csv", index=False)
    assert file.with_suffix(".csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert file.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert {path.name for path in file.parent.iterdir()} == {"fit.parquet", "fit.csv"}
    monkeypatch.setattr(collecting, "GROUP", 2)
    (file,) = collect(folder).values()
    pd.testing.assert_frame_equal(pd.read_parquet(file), pd.read_parquet(tmp_path / "whole.parquet"))
