"""What stands in a table's cells, in any format."""

from __future__ import annotations

from typing import NamedTuple

from aligners.reports.study.contents import Cell, Column, Table
from aligners.reports.study.estimates import Estimate
from aligners.reports.words import fixed

__all__ = ["Written", "plain_cell", "plain_rows", "written"]


class Written(NamedTuple):
    """A cell as text.

    Attributes:
        value: the number or the words; empty where there is nothing.
        sd: `± sd`, or empty.
        interval: its two ends in brackets, or in braces where they are a mere range; or empty.
        lost: how many pairs are left out, or empty.
        key: what the cell is sorted by.
    """

    value: str
    sd: str = ""
    interval: str = ""
    lost: str = ""
    key: float | str = ""


def written(cell: Cell, column: Column) -> Written:
    """Write a cell as its column says."""
    if cell is None:
        return Written("")
    if isinstance(cell, Estimate):
        return _estimate(cell, column)
    if isinstance(cell, str):
        return Written(cell, key=cell)
    return Written(fixed(cell if column.form == "d" else column.scale * cell, column.form), key=float(cell))


def plain_cell(cell: Cell, column: Column) -> str:
    """A cell as plain text in one piece."""
    return " ".join(part for part in written(cell, column)[:4] if part)


def plain_rows(table: Table) -> list[list[str]]:
    """All cells as plain text, row by row."""
    return [[plain_cell(row.get(column.key), column) for column in table.columns] for row in table.rows]


def _estimate(cell: Estimate, column: Column) -> Written:
    def number(value: float) -> str:
        return fixed(column.scale * value, column.form)

    interval = ""
    if cell.low is not None and cell.high is not None:
        left, right = "[]" if cell.over_models else "{}"
        interval = f"{left}{number(cell.low)}, {number(cell.high)}{right}"
    sd = "" if cell.sd is None else f"± {number(cell.sd)}"
    lost = f"({cell.lost} of {cell.pairs + cell.lost} pairs lost)" if cell.lost else ""
    return Written(number(cell.mean), sd, interval, lost, cell.mean)
