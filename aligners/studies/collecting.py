"""One table of each kind, from the results of all cells."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

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
PART, GROUP = (
    2**16,
    2**4,
)  # rows that are in memory as they come; parts in a row group of Parquet, 2²⁰ rows
# of the similarities, which may be millions: columns that no report of a study shows; nor does one show other features
UNREAD = {"cell", "kind", "label", "low", "high", "null_high", "ceiling", "chance", "n_rows"}
OF_ALL_ROWS = ("rows", "majority_score")  # what a report says once, and tables in every row


def tables(folder: StudyFolder) -> dict[str, pd.DataFrame]:
    """Write the tables as `collect` does, and read of them what the report of a study is made of."""
    frames = {}
    for name, path in collect(folder).items():
        there = pq.read_schema(path).names
        columns = (
            [column for column in there if column not in UNREAD] if name == "similarity" else None
        )
        raw = [("features", "==", "raw")] if columns and "features" in there else None
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
    place, groups, by_name = (
        folder.path / TABLES,
        Models(**folder.study["models"]),
        dict[str, _Table](),
    )
    let_write(folder.path)
    place.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix=".parts-", dir=place) as parts:
        for number in folder.cells:
            cell = folder.described(number)
            table = KINDS[cell["kind"]].table
            if table is None or folder.state(number) != "done":
                continue
            meta, models = (
                folder.about(number).get("meta", {}),
                {model["path"]: model for model in cell["models"]},
            )
            known: dict[tuple[str | None, ...], dict[str, Any]] = {}
            for kind, row in folder.rows(number):
                paths = (
                    {"": row["model"]}
                    if "model" in row
                    else {"_x": row.get("model_x"), "_y": row.get("model_y")}
                )
                if (named := tuple(paths.values())) not in known:
                    known[named] = _of_models(paths, cell, models, groups)
                name = table if kind == "rows" else f"{table}_{kind}"
                if name not in by_name:
                    by_name[name] = _Table(Path(parts) / name)
                by_name[name].add(_about(row, meta, known[named]))
        return {name: table.write(place / name) for name, table in by_name.items()}


class _Table:
    """A table that is kept in parts until all of its columns and their types are known: those of all rows together.

    Args:
        folder: of the parts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._rows = folder, list[dict[str, Any]]()
        self._columns, self._empty = dict[str, None](), Counter[str]()
        self._samples, self._schemas = list[pd.DataFrame](), list[pa.Schema]()
        folder.mkdir()

    def add(self, row: dict[str, Any]) -> None:
        """Add a row."""
        self._rows.append(row)
        if len(self._rows) == PART:
            self._put_away()

    def _put_away(self) -> None:
        part = pd.DataFrame(self._rows)
        self._rows.clear()
        self._columns |= dict.fromkeys(part)
        first = {name: column.first_valid_index() for name, column in part.items()}
        values = {
            name: part[name].iloc[[place]] for name, place in first.items() if place is not None
        }  # copies
        sample = pd.DataFrame(
            {name: value.reset_index(drop=True) for name, value in values.items()}
        )
        self._empty.update(
            name for name in part if name not in sample and part[name].dtype == object
        )
        table = pa.Table.from_pandas(part[[*sample]], preserve_index=False)
        pq.write_table(table, self._folder / f"{len(self._samples):05d}")
        self._samples.append(sample)
        self._schemas.append(table.schema)

    def write(self, path: Path) -> Path:
        """Write all rows beside `path`, as Parquet and as CSV; the former."""
        if self._rows:
            self._put_away()
        sample = pd.concat(self._samples, ignore_index=True).reindex(columns=[*self._columns])
        kinds = {
            name: object if self._empty[name] == len(self._samples) else sample[name].dtype
            for name in sample
        }
        first = pa.Schema.from_pandas(sample.astype(kinds), preserve_index=False)
        schema = pa.unify_schemas(
            [first, *self._schemas], promote_options="permissive"
        ).with_metadata(first.metadata)
        files = sorted(self._folder.iterdir())
        parquet, csv = (path.with_suffix(f".{end}") for end in ("parquet", "csv"))
        with (
            whole_file(parquet) as rows,
            whole_file(csv) as lines,
            lines.open("w", encoding="utf-8", newline="") as text,
            pq.ParquetWriter(rows, schema) as writer,
        ):
            for group in range(0, len(files), GROUP):
                several = []
                for file in files[group : group + GROUP]:
                    part = pq.read_table(file).to_pandas().reindex(columns=[*kinds]).astype(kinds)
                    csv_frame(part).to_csv(text, index=False, header=file == files[0])
                    several.append(pa.Table.from_pandas(part, schema, preserve_index=False))
                writer.write_table(pa.concat_tables(several).combine_chunks())
        return parquet


def _about(row: Row, meta: Row, known: Row) -> dict[str, Any]:
    """A row of a cell's report, with what it is about, as the study file names it, in front.

    Args:
        row: of the report.
        meta: of the report.
        known: what is known of its models; see `_of_models`.
    """
    about = dict(known)
    if "kind" in row:
        about["condition"] = row["kind"]
    if "task" in row:
        about |= {"probed": row["task"], "corpus": meta["text"]["source"]}
    about |= {name: meta[name] for name in OF_ALL_ROWS if name in meta and name not in row}
    return {**about, **{name: value for name, value in row.items() if name not in about}}


def _of_models(
    paths: Mapping[str, str | None], cell: Row, models: Mapping[str, Row], groups: Models
) -> dict[str, Any]:
    """The columns of a row that say of which cell and which models it is.

    Args:
        paths: of the models, as commands name them, by the end of their columns' names.
        cell: what the cell is.
        models: that the cell is about, by the names that commands give them.
        groups: of the study.
    """
    named = {
        side: models.get(path, {"name": path, "stage": None}) if path else None
        for side, path in paths.items()
    }
    known = {
        side: model or (cell["models"][0] if side != "_y" else None)
        for side, model in named.items()
    }
    stages = {model["stage"] for model in known.values() if model is not None}
    about = {
        name: cell[value] for name, value in (("cell", "id"), ("kind", "kind"), ("task", "task"))
    }
    about["stage"] = stages.pop() if len(stages) == 1 else None
    for column, value in (("model", "name"), ("stage", "stage"), ("tuned", "tuned_on")):
        about |= {column + side: model and model.get(value) for side, model in known.items()}
    options: Sequence[Literal["groups", "bases"]] = (
        ("groups", "bases") if groups.bases else ("groups",)
    )
    for option in options:
        column = option.removesuffix("s")
        about |= {
            f"{column}{side}": model and groups.group(model["name"], option)
            for side, model in known.items()
        }
    return about
