"""Results are read row by row, and tables written part by part: the same as from all rows at once."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tests.cells import begun, finish

from aligners.studies import collecting
from aligners.studies.collecting import collect
from aligners.studies.study_folder import StudyFolder, as_lines

RESULT: dict[str, Any] = {
    "kind": "fit", "seconds": 12.25, "meta": {"text": {"source": "a \"}] {"}, "empty": []},
    "rows": [{"name": "ä, [1]", "n": 12345678901, "value": -1.5e-7}, {"name": None, "deep": {"a": [1, {}]}}],
    "none": [], "findings": ["In words: { }."], "layers": [{"layer": 1}], "last": 7,
}  # fmt: skip


@pytest.mark.parametrize("write", [as_lines, json.dumps, partial(json.dumps, indent=2)])  # and two of earlier versions
def test_a_result_is_read_by_lines(tmp_path: Path, write: Callable[[Any], str]) -> None:
    folder, file = StudyFolder(tmp_path), tmp_path / "cells" / "a" / "result.json"
    file.parent.mkdir(parents=True)
    file.write_text(write(RESULT))
    assert json.loads(file.read_text()) == RESULT
    assert folder.about("a") == {name: RESULT[name] for name in ("kind", "seconds", "meta", "findings", "last")}
    rows = [("rows", row) for row in RESULT["rows"]] + [("layers", {"layer": 1})]
    assert list(folder.rows("a")) == rows
    cut = file.read_text()
    file.write_text(cut[: cut.index("123")])
    with pytest.raises(ValueError, match=r"Expected .*result\.json to be the result of a cell.*JSONDecodeError"):
        list(folder.rows("a"))


def test_a_row_is_read_without_those_after_it(tmp_path: Path) -> None:
    text = as_lines({"kind": "fit", "rows": [{"n": 1}, {"n": 2}]})
    file = tmp_path / "cells" / "a" / "result.json"
    file.parent.mkdir(parents=True)
    file.write_text(text.replace("2", "not JSON"))
    assert next(StudyFolder(tmp_path).rows("a")) == ("rows", {"n": 1})


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
