"""The findings of a run, ready to be written, shown and logged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

__all__ = ["Report", "Row"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Report:
    """A report of any kind. `aligners.reports.publishing` writes, shows and logs it.

    Attributes:
        name: name of the JSON, CSV and Markdown files, and of the table at W&B.
        meta: what holds for all rows.
        rows: one for each thing that was measured, all with the same keys.
        tables: further rows by name: each an entry of the JSON file and, unless empty, a CSV file.
        columns: key -> heading of the Markdown table; without any there is no Markdown file.
        figures: name of the file -> function that draws it.
        screen: tables to show, with short names of models.
        note: a line below them.
        sentences: the findings in words.
        files: name of the files for the last line on screen.
    """

    name: str
    meta: Row
    rows: Sequence[Row]
    tables: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, Callable[[], Figure]] = field(default_factory=dict)
    screen: Sequence[Table] = ()
    note: str = ""
    sentences: Sequence[str] = ()
    files: str = "Report and figures"
