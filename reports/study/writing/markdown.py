"""Tables of a study as Markdown."""

from __future__ import annotations

from reports.study.contents import Table
from reports.study.writing.cells import plain_rows

__all__ = ["markdown"]


def markdown(table: Table) -> str:
    """Write a table with its title, caption and notes."""
    lines = [[column.heading for column in table.columns], ["---"] * len(table.columns), *plain_rows(table)]
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    notes = [f"- {said}" for said in (*table.findings, *table.notes)]
    return "\n".join([f"## {table.title}", "", table.caption, "", *rows, "", *notes, ""])
