import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import WandbLogger
from matplotlib.figure import Figure
from rich.table import Table

from aligners.reports.publishing import WriteReport, publish, write
from aligners.reports.report import Report, Row

ROWS: list[Row] = [
    {"model_x": "deep/x", "model_y": "y", "site_x": 1, "site_y": 2, "fvu": 0.123456},
    {"model_x": "deep/x", "model_y": "y", "site_x": 3, "site_y": 3, "fvu": None},
]


def trainer(*loggers: Any) -> Any:
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    return SimpleNamespace(is_global_zero=True, loggers=list(loggers), strategy=strategy, world_size=1)


def whole(**changes: Any) -> Report:
    table = Table("fvu")
    table.add_row(".123")
    given: dict[str, Any] = {
        "tables": {"more": [{"a": 1}], "none": []},
        "columns": {"model_x": "from", "site_x": "site", "fvu": "FVU"},
        "figures": {"drawn": partial(Figure, figsize=(1, 1))},
        "screen": [table],
        "note": "a note",
        "sentences": ["It holds."],
    }
    return Report("thing", {"seed": 3}, ROWS, **(given | changes))


def test_a_folder_holds_all_that_a_report_has(tmp_path: Path) -> None:
    assert write(whole(), tmp_path / "new") == [tmp_path / "new" / "drawn.png"]
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {"thing.json", "thing.csv", "thing.md", "more.csv", "drawn.png"}
    found = json.loads((tmp_path / "new" / "thing.json").read_text())
    assert found == {"meta": {"seed": 3}, "findings": ["It holds."], "rows": ROWS, "more": [{"a": 1}], "none": []}
    text = (tmp_path / "new" / "thing.md").read_text()
    lines = ["| from | site | FVU |", "|---|---|---|", "| x | 1→2 | 0.1235 |", "| x | 3 |  |"]
    assert text == "\n".join([*lines, "", "- It holds.", "", "- x: `deep/x`", ""])


def test_what_a_report_lacks_leaves_no_file(tmp_path: Path) -> None:
    write(whole(tables={}, columns={}, figures={}, sentences=[]), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"thing.json", "thing.csv"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(Report("bad", {"x": float("nan")}, ROWS), tmp_path)
    assert not (tmp_path / "bad.json").exists()


def test_a_report_is_shown_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(whole(), tmp_path, trainer())
    shown = capsys.readouterr().out
    places = [shown.index(part) for part in (".123", "a note", "It holds.", f"Report and figures: {tmp_path}")]
    assert places == sorted(places)


def test_wandb_has_the_rows_the_figures_and_what_holds_for_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    logged: dict[str, Any] = {}
    logger.log_table = lambda key, columns, data: logged.update({key: (columns, data)})  # type: ignore[method-assign]
    logger.log_image = lambda key, images: logged.update({key: images})  # type: ignore[method-assign]
    publish(whole(), tmp_path / "run", trainer(logger))
    assert logged["thing"] == (list(ROWS[0]), [list(row.values()) for row in ROWS])
    assert logged["drawn"] == [str(tmp_path / "run" / "drawn.png")]
    assert logger.experiment.config["seed"] == 3
    assert f"W&B run: {Path(logger.experiment.dir).parent}" in capsys.readouterr().out
    logger.experiment.finish()


def test_the_callback_hands_tables_and_options_to_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Any] = []

    def report(meta: Row, rows: list[Row], curves: list[Row], groups: list[str]) -> Report:
        got.extend((meta["seed"], meta["ranks"], rows, curves, groups))
        return Report("thing", meta, rows)

    monkeypatch.setattr("aligners.reports.finished.maker", lambda kind: report)
    module: Any = SimpleNamespace(meta={"seed": 3}, rows=ROWS, report_tables={"curves": [{"step": 1}]})
    for rank in (1, 0):
        run = trainer()
        run.is_global_zero = rank == 0
        WriteReport("surgery", tmp_path / "new", groups=["a"]).on_test_end(run, module)
        assert (tmp_path / "new" / "surgery.json").exists() == (rank == 0)
    assert got == [3, 1, ROWS, [{"step": 1}], ["a"]]
