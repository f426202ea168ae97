"""One table of each kind, from the results of all cells."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from aligners.files.whole import whole_file
from aligners.studies.cells import KINDS
from aligners.studies.folder import StudyFolder
from aligners.studies.spec import Models

TABLES = "tables"
Row = Mapping[str, Any]
OF_ALL_ROWS = ("rows", "majority_score")  # what a report says once, and tables in every row


def tables(folder: StudyFolder) -> dict[str, pd.DataFrame]:
    """The rows of all finished cells, by the name of their table.

    Columns: `cell`, `kind`, `task`, `stage` (null where models of two stages are compared), `model_x` and `model_y` as
    the study file names them, their `stage_x`, `stage_y`, `tuned_x` and `tuned_y` (the task that each was fine-tuned
    on), `group_x` and `group_y`, then the report's own. Further tables of a report, such as the layers of a comparison,
    are called KIND_NAME; rows about one model have `model`. What a report calls `kind` is `condition`, and a task that
    it probes is `probed`, on the sentences of `corpus`.

    Args:
        folder: of the study.
    """
    by_table: dict[str, list[dict[str, Any]]] = {}
    groups = Models(**folder.study["models"])
    for number in folder.cells:
        cell = folder.described(number)
        table = KINDS[cell["kind"]].table
        if table is None or folder.state(number) != "done":
            continue
        result, models = folder.result(number), {model["path"]: model for model in cell["models"]}
        for name, rows in result.items():
            if name == "rows" or (isinstance(rows, list) and name != "findings"):
                place = by_table.setdefault(table if name == "rows" else f"{table}_{name}", [])
                place.extend(_about(row, result["meta"], cell, models, groups) for row in rows)
    return {name: pd.DataFrame(rows) for name, rows in by_table.items() if rows}


def collect(folder: StudyFolder) -> dict[str, pd.DataFrame]:
    """Write the tables, each as Parquet and as CSV, whole or not at all, and return them by their names."""
    collected = tables(folder)
    (folder.path / TABLES).mkdir(exist_ok=True)
    for name, table in collected.items():
        for end, write in (("parquet", table.to_parquet), ("csv", table.to_csv)):
            with whole_file(folder.path / TABLES / f"{name}.{end}") as unfinished:
                write(unfinished, index=False)
    return collected


def _about(row: Row, meta: Row, cell: Row, models: Mapping[str, Row], groups: Models) -> dict[str, Any]:
    """A row of a cell's report, with what it is about, as the study file names it, in front.

    Args:
        row: of the report.
        meta: of the report.
        cell: what the cell is.
        models: that the cell is about, by the names that commands give them.
        groups: of the study.
    """
    paths = {"": row["model"]} if "model" in row else {"_x": row.get("model_x"), "_y": row.get("model_y")}
    named = {side: models.get(path, {"name": path, "stage": None}) if path else None for side, path in paths.items()}
    known = {side: model or (cell["models"][0] if side != "_y" else None) for side, model in named.items()}
    stages = {model["stage"] for model in known.values() if model is not None}
    about = {name: cell[value] for name, value in (("cell", "id"), ("kind", "kind"), ("task", "task"))}
    about["stage"] = stages.pop() if len(stages) == 1 else None
    for column, value in (("model", "name"), ("stage", "stage"), ("tuned", "tuned_on")):
        about |= {column + side: model and model.get(value) for side, model in known.items()}
    for column in ("group", "base") if groups.bases else ("group",):
        about |= {
            f"{column}{side}": model and groups.group(model["name"], f"{column}s") for side, model in known.items()
        }
    if "kind" in row:
        about["condition"] = row["kind"]
    if "task" in row:
        about |= {"probed": row["task"], "corpus": meta["text"]["source"]}
    about |= {name: meta[name] for name in OF_ALL_ROWS if name in meta and name not in row}
    return {**about, **{name: value for name, value in row.items() if name not in about}}
