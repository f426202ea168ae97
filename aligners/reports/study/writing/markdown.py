"""Tables of a study as Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from aligners.reports.study.contents import Table
from aligners.reports.study.registry import Found
from aligners.reports.study.writing.cells import plain_rows

__all__ = ["findings_text", "markdown"]


def markdown(table: Table) -> str:
    """Write a table with its title, caption and notes."""
    lines = [[column.heading for column in table.columns], ["---"] * len(table.columns), *plain_rows(table)]
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    notes = [f"- {said}" for said in (*table.findings, *table.notes)]
    return "\n".join([f"## {table.title}", "", table.caption, "", *rows, "", *notes, ""])


def findings_text(findings: Iterable[Found]) -> str:
    """Write what tables and figures say in words."""
    return "\n".join(f"## {found.title}\n\n" + "".join(f"- {said}\n" for said in found.said) for found in findings)
