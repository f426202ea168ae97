"""One table of each kind, from the results of all cells."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from aligners.files.whole import whole_file
from aligners.studies.folder import StudyFolder
from aligners.studies.kinds import KINDS
from aligners.studies.spec import Models

__all__ = ["collect", "tables"]

TABLES = "tables"
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
    found: dict[str, list[dict[str, Any]]] = {}
    groups = Models(**folder.study["models"])
    for number in folder.cells:
        cell = folder.described(number)
        table = KINDS[cell["kind"]].table
        if table is None or folder.state(number) != "done":
            continue
        result, about = folder.result(number), _About(folder, cell, groups)
        for name, rows in result.items():
            if name == "rows" or (isinstance(rows, list) and name != "findings"):
                place = found.setdefault(table if name == "rows" else f"{table}_{name}", [])
                place.extend(about.row(row, result["meta"]) for row in rows)
    return {name: pd.DataFrame(rows) for name, rows in found.items() if rows}


def collect(folder: StudyFolder) -> dict[str, Path]:
    """Write the tables, each as Parquet and as CSV, whole or not at all; return the Parquet files by their names."""
    place, files = folder.path / TABLES, {}
    place.mkdir(exist_ok=True)
    for name, table in tables(folder).items():
        files[name] = place / f"{name}.parquet"
        with whole_file(files[name]) as unfinished:
            table.to_parquet(unfinished, index=False)
        with whole_file(place / f"{name}.csv") as unfinished:
            table.to_csv(unfinished, index=False)
    return files


class _About:
    """What the rows of a cell are about, as the study file names it."""

    def __init__(self, folder: StudyFolder, cell: Mapping[str, Any], groups: Models) -> None:
        self.cell, self.groups = cell, groups
        self.models = {folder.filled(model["path"]): model for model in cell["models"]}

    def row(self, row: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
        """A row of the report, with what it is about in front."""
        sides = {"": row["model"]} if "model" in row else {"_x": row.get("model_x"), "_y": row.get("model_y")}
        known = {side: self._known(path, first=side != "_y") for side, path in sides.items()}
        stages = {model["stage"] for model in known.values() if model is not None}
        about = {name: self.cell[value] for name, value in (("cell", "id"), ("kind", "kind"), ("task", "task"))}
        about["stage"] = stages.pop() if len(stages) == 1 else None
        for column, value in (("model", "name"), ("stage", "stage"), ("tuned", "tuned_on")):
            about |= {column + side: model and model.get(value) for side, model in known.items()}
        about |= {f"group{side}": model and self.groups.group(model["name"]) for side, model in known.items()}
        if "kind" in row:
            about["condition"] = row["kind"]
        if "task" in row:
            about |= {"probed": row["task"], "corpus": meta["text"]["source"]}
        about |= {name: meta[name] for name in OF_ALL_ROWS if name in meta and name not in row}
        return {**about, **{name: value for name, value in row.items() if name not in about}}

    def _known(self, path: str | None, *, first: bool) -> Mapping[str, Any] | None:
        """The model of this name; where a row names none, the one that the cell is about."""
        if path is None:
            return self.cell["models"][0] if first else None
        return self.models.get(path, {"name": path, "stage": None})
