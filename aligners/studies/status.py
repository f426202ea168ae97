"""How far a study is."""

from __future__ import annotations

from collections import Counter

from rich.table import Table

from aligners.reports.screen import site_table
from aligners.studies.folder import ERROR, State, StudyFolder

__all__ = ["failures", "status_table"]

STATES: tuple[State, ...] = ("done", "running", "waiting", "failed")


def status_table(folder: StudyFolder) -> Table:
    """Count the cells by kind and state."""
    counts = Counter((folder.described(number)["kind"], folder.state(number)) for number in folder.cells)
    table = site_table(f"{folder.name}: {len(folder.cells)} cells in {folder.path}", ["cells"], list(STATES), {})
    for kind in dict.fromkeys(kind for kind, _ in counts):
        table.add_row(kind, *(str(counts[kind, state] or "") for state in STATES))
    return table


def failures(folder: StudyFolder) -> list[str]:
    """One line for each failed cell: what it is, the last line of its traceback, and where to read all of it."""
    lines = []
    for number in folder.cells:
        if folder.state(number) == "failed":
            cell, file = folder.described(number), folder.cell(number) / ERROR
            names = " – ".join(model["name"] for model in cell["models"][:4])
            last = file.read_text(encoding="utf-8").strip().splitlines()[-1]
            lines.append(f"{cell['kind']} {names}, {cell['task']}: {last}\n  {file}")
    return lines
