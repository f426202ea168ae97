"""One table of each kind, from the results of all cells."""

from collections import Counter
from collections.abc import Iterator
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
Row = dict[str, Any]
PART = 2**16  # rows in memory as they come
GROUP = 2**4  # parts in a row group of Parquet: 2²⁰ rows
# Columns of the similarities that no report of a study shows.
UNREAD = {"cell", "kind", "label", "low", "high"}
UNREAD |= {"null_high", "ceiling", "chance", "n_rows", "effect", "p", "p_family"}
CELL_COLUMNS = {"cell": "id", "kind": "kind", "task": "task"}
MODEL_COLUMNS = {"model": "name", "stage": "stage", "tuned": "tuned_on"}
# What a report says once, and tables in every row.
OF_ALL_ROWS = ("rows", "majority_score")


def tables(folder: StudyFolder) -> dict[str, pd.DataFrame]:
    """Write the tables as `collect` does, and read of them what the report of a study is made of."""
    frames = {}
    for name, path in collect(folder).items():
        if name == "similarity":
            frames[name] = _similarities(path)
        else:
            frames[name] = pd.read_parquet(path)
    return frames


def _similarities(path: Path) -> pd.DataFrame:
    """Read a table of similarities, which may have millions of rows, without what no report of a study shows."""
    there = pq.read_schema(path).names
    columns = [column for column in there if column not in UNREAD]
    filters = None
    if "features" in there:
        filters = [("features", "==", "raw")]
    return pd.read_parquet(path, columns=columns, filters=filters)


def collect(folder: StudyFolder) -> dict[str, Path]:
    """Write the rows of all finished cells, each table as Parquet and as CSV, whole or not at all.

    Columns: `cell`, `kind`, `task`, `stage` (null where models of two stages are compared), `model_x` and `model_y` as
    the study file names them, their `stage_x`, `stage_y`, `tuned_x` and `tuned_y` (the task that each was fine-tuned
    on), `group_x` and `group_y`, then the report's own. Further tables of a report, such as the layers of a comparison,
    are called KIND_NAME; rows about one model have `model`. What a report calls `kind` is `condition`, and a task that
    it probes is `probed`, on the sentences of `corpus`.

    Rows are read one by one and written by columns, a part of a table at a time.

    Args:
        folder: folder of the study.

    Returns:
        The Parquet file of each table.
    """
    let_write(folder.path)
    place = folder.path / TABLES
    place.mkdir(exist_ok=True)
    written = {}
    with TemporaryDirectory(prefix=".parts-", dir=place) as parts:
        by_name: dict[str, _Table] = {}
        for name, row in _rows(folder):
            if name not in by_name:
                by_name[name] = _Table(Path(parts) / name)
            by_name[name].add(row)
        for name, table in by_name.items():
            written[name] = table.write(place / name)
    return written


def _rows(folder: StudyFolder) -> Iterator[tuple[str, Row]]:
    """Yield the rows of all finished cells, each with the name of its table."""
    groups = Models(**folder.study["models"])
    for number in folder.cells:
        cell = folder.described(number)
        table = KINDS[cell["kind"]].table
        if table is None or folder.state(number) != "done":
            continue
        meta = folder.about(number).get("meta", {})
        about = _About(cell, groups)
        for kind, row in folder.rows(number):
            name = table if kind == "rows" else f"{table}_{kind}"
            columns = about.of(row)
            yield name, _described(row, meta, columns)


def _described(row: Row, meta: Row, about: Row) -> Row:
    """Add to a row of a cell's report the columns on what it is about, in the study file's names.

    Args:
        row: row of the report.
        meta: of the report.
        about: columns of the row's cell and models.
    """
    found = dict(about)
    if "kind" in row:
        found["condition"] = row["kind"]
    if "task" in row:
        found["probed"] = row["task"]
        found["corpus"] = meta["text"]["source"]
    for name in OF_ALL_ROWS:
        if name in meta and name not in row:
            found[name] = meta[name]
    for name, value in row.items():
        found.setdefault(name, value)
    return found


class _About:
    """The columns that say which cell and which models a row belongs to.

    Args:
        cell: what the cell is.
        groups: groups of the study.
    """

    def __init__(self, cell: Row, groups: Models) -> None:
        self._cell = cell
        self._groups = groups
        self._models = {model["path"]: model for model in cell["models"]}
        self._known: dict[tuple[Any, ...], Row] = {}

    def of(self, row: Row) -> Row:
        """The columns for a row of the cell's report."""
        paths = {"_x": row.get("model_x"), "_y": row.get("model_y")}
        if "model" in row:
            paths = {"": row["model"]}
        key = tuple(paths.values())
        if key not in self._known:
            self._known[key] = self._columns(paths)
        return self._known[key]

    def _columns(self, paths: Row) -> Row:
        """Return the columns for rows of these models, or of this one, by the endings of their names."""
        models = {}
        stages = set()
        for side, path in paths.items():
            model = self._model(side, path)
            models[side] = model
            if model:
                stages.add(model["stage"])
        columns = {}
        for column, key in CELL_COLUMNS.items():
            columns[column] = self._cell[key]
        columns["stage"] = stages.pop() if len(stages) == 1 else None
        for column, key in MODEL_COLUMNS.items():
            for side, model in models.items():
                columns[f"{column}{side}"] = model.get(key)
        for side, model in models.items():
            name = model.get("name", "")
            columns[f"group{side}"] = self._groups.group(name)
        if not self._groups.bases:
            return columns
        for side, model in models.items():
            name = model.get("name", "")
            columns[f"base{side}"] = self._groups.group(name, "bases")
        return columns

    def _model(self, side: str, path: str | None) -> Row:
        """Return a row's model: by default the cell's first for X, and none for Y; empty: none."""
        if path:
            return self._models.get(path, {"name": path, "stage": None})
        if side == "_y":
            return {}
        return self._cell["models"][0]


class _Table:
    """A table that is kept in parts until its columns and their types are known, as decided by all rows.

    Args:
        folder: folder of the parts.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._rows: list[Row] = []
        self._columns: dict[str, None] = {}
        # Of each part the first value of each column, and the types.
        self._samples: list[pd.DataFrame] = []
        self._schemas: list[pa.Schema] = []
        # Parts in which a column has neither value nor type.
        self._untyped: Counter[str] = Counter()

    def add(self, row: Row) -> None:
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
                value = column.iloc[[place]]  # a copy
                sample[name] = value.reset_index(drop=True)
            elif column.dtype == object:
                self._untyped[str(name)] += 1
        filled = part[[*sample]]
        table = pa.Table.from_pandas(filled, preserve_index=False)
        name = f"{len(self._samples):05d}"
        pq.write_table(table, self._folder / name)
        self._samples.append(pd.DataFrame(sample))
        self._schemas.append(table.schema)

    def write(self, path: Path) -> Path:
        """Write all rows beside `path`, as Parquet and as CSV; the former."""
        if self._rows:
            self._put_away()
        kinds, schema = self._types()
        parquet = path.with_suffix(".parquet")
        csv = path.with_suffix(".csv")
        with (
            whole_file(parquet) as rows,
            whole_file(csv) as lines,
            lines.open("w", encoding="utf-8", newline="") as text,
            pq.ParquetWriter(rows, schema) as writer,
        ):
            group = []
            for number, part in enumerate(self._parts(kinds)):
                csv_frame(part).to_csv(text, index=False, header=number == 0)
                table = pa.Table.from_pandas(part, schema, preserve_index=False)
                group.append(table)
                last = number == len(self._samples) - 1
                if last or len(group) == GROUP:
                    joined = pa.concat_tables(group)
                    writer.write_table(joined.combine_chunks())
                    group.clear()
        return parquet

    def _parts(self, kinds: Row) -> Iterator[pd.DataFrame]:
        """Yield the parts, each with all columns."""
        for file in sorted(self._folder.iterdir()):
            part = pq.read_table(file).to_pandas()
            whole = part.reindex(columns=[*kinds])
            yield whole.astype(kinds)

    def _types(self) -> tuple[Row, pa.Schema]:
        """Return the types of the columns in pandas and in Parquet."""
        sample = pd.concat(self._samples, ignore_index=True)
        sample = sample.reindex(columns=[*self._columns])
        kinds = sample.dtypes.to_dict()
        for name, parts in self._untyped.items():
            if parts == len(self._samples):
                kinds[name] = object
        sample = sample.astype(kinds)
        first = pa.Schema.from_pandas(sample, preserve_index=False)
        schema = pa.unify_schemas([first, *self._schemas], promote_options="permissive")
        return kinds, schema.with_metadata(first.metadata)
