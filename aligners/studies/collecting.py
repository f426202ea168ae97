"""One table of each kind, from the results of all cells."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import pyarrow as pa
from pyarrow import parquet as pq

from aligners.files.atomic import let_write, whole_file
from aligners.reports.escaping import csv_frame
from aligners.studies.cells import KINDS
from aligners.studies.spec import Models
from aligners.studies.study_folder import StudyFolder

TABLES = "tables"
Row = Mapping[str, Any]
PART = 2**16  # rows in memory as they come
GROUP = 2**4  # parts in a row group of Parquet: 2²⁰ rows
# Of the similarities, which may be millions: columns that no report of a study shows; nor does one show other features.
UNREAD = {
    "cell",
    "kind",
    "label",
    "low",
    "high",
    "null_high",
    "ceiling",
    "chance",
    "n_rows",
}
CELL_COLUMNS = {"cell": "id", "kind": "kind", "task": "task"}
OF_ALL_ROWS = (
    "rows",
    "majority_score",
)  # what a report says once, and tables in every row


def tables(folder: StudyFolder) -> dict[str, pd.DataFrame]:
    """Write the tables as `collect` does, and read of them what the report of a study is made of."""
    frames = {}
    for name, path in collect(folder).items():
        if name != "similarity":
            frames[name] = pd.read_parquet(path)
            continue
        there = pq.read_schema(path).names
        columns = [column for column in there if column not in UNREAD]
        raw = [("features", "==", "raw")] if "features" in there else None
        frames[name] = pd.read_parquet(path, columns=columns, filters=raw)
    return frames


def collect(folder: StudyFolder) -> dict[str, Path]:
    """Write the rows of all finished cells, each table as Parquet and as CSV, whole or not at all.

    Columns: `cell`, `kind`, `task`, `stage` (null where models of two stages are compared), `model_x` and `model_y` as
    the study file names them, their `stage_x`, `stage_y`, `tuned_x` and `tuned_y` (the task that each was fine-tuned
    on), `group_x` and `group_y`, then the report's own. Further tables of a report, such as the layers of a comparison,
    are called KIND_NAME; rows about one model have `model`. What a report calls `kind` is `condition`, and a task that
    it probes is `probed`, on the sentences of `corpus`.

    Rows are read one by one and written by columns, a part of a table at a time.

    Args:
        folder: of the study.

    Returns:
        The Parquet file of each table.
    """
    place = folder.path / TABLES
    groups = Models(**folder.study["models"])
    let_write(folder.path)
    place.mkdir(exist_ok=True)
    by_name: dict[str, _Table] = {}
    with TemporaryDirectory(prefix=".parts-", dir=place) as parts:
        for number in folder.cells:
            cell = folder.described(number)
            table = KINDS[cell["kind"]].table
            if table is None or folder.state(number) != "done":
                continue
            meta = folder.about(number).get("meta", {})
            about = _About(cell, groups)
            for kind, row in folder.rows(number):
                name = table if kind == "rows" else f"{table}_{kind}"
                if name not in by_name:
                    by_name[name] = _Table(Path(parts) / name)
                by_name[name].add(_described(row, meta, about.of(row)))
        return {name: table.write(place / name) for name, table in by_name.items()}


def _described(row: Row, meta: Row, about: Row) -> dict[str, Any]:
    """A row of a cell's report, after what it is about, as the study file names it.

    Args:
        row: of the report.
        meta: of the report.
        about: columns of the row's cell and models.
    """
    found = dict(about)
    if "kind" in row:
        found["condition"] = row["kind"]
    if "task" in row:
        found |= {"probed": row["task"], "corpus": meta["text"]["source"]}
    for name in OF_ALL_ROWS:
        if name in meta and name not in row:
            found[name] = meta[name]
    for name, value in row.items():
        found.setdefault(name, value)
    return found


class _About:
    """The columns that say of which cell and which models a row is.

    Args:
        cell: what the cell is.
        groups: of the study.
    """

    def __init__(self, cell: Row, groups: Models) -> None:
        self._cell, self._groups = cell, groups
        self._models = {model["path"]: model for model in cell["models"]}
        self._known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def of(self, row: Row) -> dict[str, Any]:
        """The columns for a row of the cell's report."""
        paths = {"_x": row.get("model_x"), "_y": row.get("model_y")}
        if "model" in row:
            paths = {"": row["model"]}
        key = tuple(paths.values())
        if key not in self._known:
            self._known[key] = self._columns(paths)
        return self._known[key]

    def _columns(self, paths: Row) -> dict[str, Any]:
        models = {side: self._model(side, path) for side, path in paths.items()}
        stages = {model["stage"] for model in models.values() if model}
        columns = {name: self._cell[key] for name, key in CELL_COLUMNS.items()}
        columns["stage"] = stages.pop() if len(stages) == 1 else None
        for column, key in (
            ("model", "name"),
            ("stage", "stage"),
            ("tuned", "tuned_on"),
        ):
            for side, model in models.items():
                columns[column + side] = model.get(key)
        for side, model in models.items():
            columns[f"group{side}"] = self._groups.group(model.get("name", ""))
        if self._groups.bases:
            for side, model in models.items():
                columns[f"base{side}"] = self._groups.group(
                    model.get("name", ""), "bases"
                )
        return columns

    def _model(self, side: str, path: str | None) -> Row:
        """A row's model: by default the cell's first, but no second one; empty: none."""
        if path:
            return self._models.get(path, {"name": path, "stage": None})
        return {} if side == "_y" else self._cell["models"][0]


class _Table:
    """A table that is kept in parts until all of its columns and their types are known: those of all rows together.

    Args:
        folder: of the parts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: list[dict[str, Any]] = []
        self._columns: dict[str, None] = {}
        self._samples: list[
            pd.DataFrame
        ] = []  # of each part: the first value of each column
        self._schemas: list[pa.Schema] = []
        self._untyped: Counter[str] = (
            Counter()
        )  # parts in which a column has neither value nor type
        folder.mkdir()

    def add(self, row: dict[str, Any]) -> None:
        """Add a row."""
        self._rows.append(row)
        if len(self._rows) == PART:
            self._put_away()

    def _put_away(self) -> None:
        """Write the rows so far as a part, without the columns that have no value in it."""
        part = pd.DataFrame(self._rows)
        self._rows.clear()
        sample = {}
        for name, column in part.items():
            self._columns[str(name)] = None
            place = column.first_valid_index()
            if place is not None:
                sample[name] = column.iloc[[place]].reset_index(drop=True)  # a copy
            elif column.dtype == object:
                self._untyped[str(name)] += 1
        table = pa.Table.from_pandas(part[[*sample]], preserve_index=False)
        pq.write_table(table, self._folder / f"{len(self._samples):05d}")
        self._samples.append(pd.DataFrame(sample))
        self._schemas.append(table.schema)

    def write(self, path: Path) -> Path:
        """Write all rows beside `path`, as Parquet and as CSV; the former."""
        if self._rows:
            self._put_away()
        kinds, schema = self._types()
        files = sorted(self._folder.iterdir())
        parquet, csv = path.with_suffix(".parquet"), path.with_suffix(".csv")
        with (
            whole_file(parquet) as rows,
            whole_file(csv) as lines,
            lines.open("w", encoding="utf-8", newline="") as text,
            pq.ParquetWriter(rows, schema) as writer,
        ):
            for first in range(0, len(files), GROUP):
                group = []
                for file in files[first : first + GROUP]:
                    part = (
                        pq.read_table(file)
                        .to_pandas()
                        .reindex(columns=[*kinds])
                        .astype(kinds)
                    )
                    csv_frame(part).to_csv(text, index=False, header=file == files[0])
                    group.append(
                        pa.Table.from_pandas(part, schema, preserve_index=False)
                    )
                writer.write_table(pa.concat_tables(group).combine_chunks())
        return parquet

    def _types(self) -> tuple[dict[str, Any], pa.Schema]:
        """The types of the columns in pandas and in Parquet."""
        sample = pd.concat(self._samples, ignore_index=True).reindex(
            columns=[*self._columns]
        )
        kinds = {name: sample[name].dtype for name in self._columns}
        for name, parts in self._untyped.items():
            if parts == len(self._samples):
                kinds[name] = object
        first = pa.Schema.from_pandas(sample.astype(kinds), preserve_index=False)
        schema = pa.unify_schemas([first, *self._schemas], promote_options="permissive")
        return kinds, schema.with_metadata(first.metadata)
