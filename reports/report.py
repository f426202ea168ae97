"""What a run has found, ready to be written, shown and logged."""

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
    """A report of any kind. `reports.publishing` writes, shows and logs it.

    Attributes:
        name: of its JSON, CSV and Markdown files, and of its table at W&B.
        meta: what holds for all rows.
        rows: one for each thing that was measured, with equal keys.
        tables: further rows by name: an entry of the JSON file and, where there are any, a CSV file each.
        columns: of the Markdown table: key -> heading; without any there is no Markdown file.
        figures: name of the file -> what draws it.
        screen: tables to show, models under their short names.
        note: a line below them.
        sentences: what the numbers say.
        files: what the last line on screen calls the files.
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
