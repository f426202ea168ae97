"""The report of a run, ready to be written and shown, and functions to choose, group and average its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from aligners.reports.screen import SiteTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
MODELS = ("model_x", "model_y", "model")  # columns that name a model


@dataclass(frozen=True)
class Report:
    """A report of any kind. `aligners.reports.publishing` writes, shows and logs it.

    Attributes:
        name: name of the JSON, CSV and Markdown files, and of the table at W&B.
        meta: what holds for all rows.
        rows: one for each thing that was measured, all with the same keys.
        tables: further rows by name: each an entry of the JSON file and, unless empty, a CSV file.
        columns: key -> heading of the Markdown table; without any the file has the tables of the screen.
        figures: name of the file -> function that draws it.
        screen: tables to show, with short names of models.
        note: a line below them.
        title: title of its page; default: its name.
        lead: what it found, in two or three sentences.
        sentences: further findings.
        captions: name of a figure, or what it begins with -> what it shows and what to look at.
        files: name of the files for the last line on screen; default: the report and, if there are any, its figures.
    """

    name: str
    meta: Row
    rows: Sequence[Row]
    tables: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, Callable[[], Figure]] = field(default_factory=dict)
    screen: Sequence[SiteTable] = ()
    note: str = ""
    title: str = ""
    lead: str = ""
    sentences: Sequence[str] = ()
    captions: Mapping[str, str] = field(default_factory=dict)
    files: str = ""

    @property
    def findings(self) -> list[str]:
        """All sentences of the report, the lead first."""
        return list(filter(None, [self.lead, *self.sentences]))

    @property
    def content(self) -> dict[str, Any]:
        """The content of the JSON file."""
        content = {
            "meta": self.meta,
            "findings": self.findings,
            "rows": list(self.rows),
        }
        for name, table in self.tables.items():
            content[name] = list(table)
        return content


# ---------------------------------------------------------------------- choosing rows


def where(rows: Iterable[Row], **values: object) -> list[Row]:
    """Return the rows whose columns have these values."""
    found = list(rows)
    for column, value in values.items():
        found = [row for row in found if row[column] == value]
    return found


def known(rows: Iterable[Row], column: str) -> list[Row]:
    """Return the rows that have a value in a column."""
    return [row for row in rows if row.get(column) is not None]


def is_known(rows: Iterable[Row], column: str) -> bool:
    """Tell whether any row has a value in a column."""
    return bool(known(rows, column))


def all_known(rows: Sequence[Row], *columns: str) -> bool:
    """Tell whether every row has a value in each of these columns."""
    found: Iterable[Row] = rows
    for column in columns:
        found = known(found, column)
    return len(list(found)) == len(rows)


def values(rows: Iterable[Row], column: str) -> list[Any]:
    """Return the values of a column, row by row."""
    return [row[column] for row in rows]


def models_in(rows: Iterable[Row]) -> list[str]:
    """Return the names in the columns that name a model, with repetitions."""
    names = []
    for row in rows:
        names += [row[column] for column in MODELS if column in row]
    return names


# ---------------------------------------------------------------------- grouping rows


def grouped(rows: Iterable[Row], *columns: str) -> dict[Any, list[Row]]:
    """Group rows by values of columns that occur together (for one column, by its values), in order of appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        key: Any = tuple(map(row.get, columns))
        if len(columns) == 1:
            key = key[0]
        groups.setdefault(key, []).append(row)
    return groups


def distinct(rows: Iterable[Row], *columns: str) -> list[Any]:
    """Return the values of columns that occur together (for one column, its values), in order of appearance."""
    return list(grouped(rows, *columns))


def by_column(rows: Iterable[Row], column: str) -> dict[Any, Row]:
    """Return value of a column -> its row."""
    return {row[column]: row for row in rows}


def by_sites(rows: Iterable[Row]) -> dict[tuple[int, int], Row]:
    """Return site pair -> its row."""
    return {(row["site_x"], row["site_y"]): row for row in rows}


def site_pairs(rows: Iterable[Row]) -> list[tuple[int, int]]:
    """Return the site pairs of rows that have sites, in order of appearance."""
    return distinct(known(rows, "site_x"), "site_x", "site_y")


# ---------------------------------------------------------------------- numbers of rows


def number(value: float | None) -> float:
    """Return the value, or NaN for None, which is not drawn."""
    return math.nan if value is None else value


def numbers(rows: Iterable[Row], column: str, scale: float = 1) -> list[float]:
    """Return the values of a column times `scale`; NaN where a row has none."""
    return [scale * number(row.get(column)) for row in rows]


def mean(rows: Iterable[Row], column: str, *, known: bool = False) -> float:
    """Return the mean of a column; NaN if a row has no value or, with `known`, if no row has one."""
    found = np.array([number(row[column]) for row in rows], dtype=float)
    if known:
        found = found[~np.isnan(found)]
    if not found.size:
        return math.nan
    return float(np.mean(found))


def largest(rows: Iterable[Row], column: str) -> Any:
    """Return the largest value of a column, which may be missing; None if no row has one."""
    return max(values(known(rows, column), column), default=None)
