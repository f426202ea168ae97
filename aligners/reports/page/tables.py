"""Tables of a run's report for its page: those that the screen shows, and all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from aligners.fitting.outcomes import MARK
from aligners.reports.names import with_short_names
from aligners.reports.report import Report, Row
from aligners.reports.screen import title_of

__all__ = ["Cell", "Line", "PageTable", "page_tables"]

MOST_ROWS = 400  # of all rows; the CSV file has the others
ROLES = {"green": "ceiling", "dim": "floor", "bold": "mean"}  # what a row's style on screen means


class Cell(NamedTuple):
    """A cell: what it shows, and what it is sorted by, a number where it is one."""

    value: str
    key: float | str


class Line(NamedTuple):
    """A row: its cells, and its role, which its look shows."""

    cells: Sequence[Cell]
    role: str = ""


class PageTable(NamedTuple):
    """A table of a page: name of its anchor, title, caption, headings, rows."""

    name: str
    title: str
    caption: str
    headings: Sequence[str]
    rows: Sequence[Line]


def page_tables(report: Report) -> list[PageTable]:
    """Those of the screen, then all rows, with short names of models."""
    titles = [title_of(table) for table in report.screen]
    shown = [
        _of_screen(table, number, titles.count(title) > 1)
        for number, (table, title) in enumerate(zip(report.screen, titles, strict=True), start=1)
    ]
    return [*shown, _of_rows(report)] if report.rows else shown


def _of_screen(table: Table, number: int, one_of_several: bool) -> PageTable:
    """A table of the screen; where several have one title, the groups of its columns are part of it."""
    columns = [[_plain(cell) for cell in column.cells] for column in table.columns]
    rows = [
        Line([_cell(text) for text in texts], ROLES.get(str(row.style or ""), ""))
        for texts, row in zip(zip(*columns, strict=True), table.rows, strict=True)
    ]
    roles = {line.role for line in rows}
    caption = "Sort with the headings." + (" Bold: ceilings. Grey: floors." if "ceiling" in roles else "")
    if any(cell.value.endswith(MARK) for line in rows for cell in line.cells):
        caption += f" {MARK}: untrained start, or diverged (see the findings)."
    headers = [_plain(column.header) for column in table.columns]
    title = title_of(table) or f"Table {number}"
    groups = dict.fromkeys(above for header in headers if (above := header.partition("\n")[0].strip()))
    title = f"{title}: {', '.join(groups)}" if one_of_several and groups else title
    return PageTable(f"table-{number}", title, caption, _headings(headers), rows)


def _headings(headers: Sequence[str]) -> list[str]:
    """One line for each heading: what stands above several columns is repeated in each of them."""
    found, group = [], ""
    for header in headers:
        above, _, below = header.partition("\n")
        if below and above.strip():
            group = above.strip()
        found.append(" · ".join(part for part in (group, below) if part) if below else header.strip() or "of")
    return found


def _plain(content: Any) -> str:
    return Text.from_markup(content).plain if isinstance(content, str) else str(content)


def _cell(text: str) -> Cell:
    """A cell that is sorted by its number, where it begins with one."""
    first = text.replace(",", "").replace("−", "-").rstrip("*%").split()
    try:
        return Cell(text, float(first[0]))
    except (IndexError, ValueError):
        return Cell(text, text)


def _of_rows(report: Report) -> PageTable:
    rows = with_short_names(report.rows[:MOST_ROWS])
    keys = [key for key in report.rows[0] if any(row.get(key) is not None for row in rows)]
    count = f"{len(report.rows):,} rows"
    held = f"The first {MOST_ROWS} of {count}" if len(report.rows) > MOST_ROWS else f"All {count}"
    caption = f"{held}, to four digits; {report.name}.csv has them in full. Columns without a value are left out."
    lines = [Line([_value(row[key]) for key in keys], _role(row)) for row in rows]
    return PageTable("all-rows", "All rows", caption, keys, lines)


def _role(row: Row) -> str:
    role = row.get("role")
    return role if role in ("ceiling", "floor") else ""


def _value(value: Any) -> Cell:
    if value is None:
        return Cell("", "")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Cell(str(value), str(value))
    return Cell(f"{value:.4g}" if isinstance(value, float) else str(value), float(value))
