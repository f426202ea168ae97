"""The commands for a study's folder: how far it is, its results as tables, and its report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.table import Table

from aligners.cli.run import Run, command
from aligners.reports.screen import screen, site_table
from aligners.reports.study.report import report as write_report
from aligners.studies.collecting import collect as write_tables
from aligners.studies.collecting import tables
from aligners.studies.folder import ERROR, STATES, StudyFolder


@dataclass
class Options:
    """The study.

    Args:
        folder: Of the study, such as runs/NAME.
    """

    folder: Path


# Makes a command for a study's folder of the function that does its work.
for_folder = partial(command, None, Options, usage="FOLDER [options]")


@for_folder()
def status(run: Run) -> None:
    """Count a study's cells by kind and state, and list those that failed."""
    folder = StudyFolder(run.options.folder)
    screen().print(status_table(folder))
    for line in failures(folder):
        print(line)


@for_folder()
def collect(run: Run) -> None:
    """Write the results of all finished cells into one table of each kind, Parquet and CSV."""
    for file in write_tables(StudyFolder(run.options.folder)).values():
        print(file)


@for_folder()
def report(run: Run) -> None:
    """Collect the results of a study's cells, and make its tables and figures."""
    collect_and_report(StudyFolder(run.options.folder))


def collect_and_report(folder: StudyFolder) -> None:
    """Collect the results, and make the report if there is anything to report on."""
    write_tables(folder)
    collected = tables(folder)
    if collected:
        write_report(folder.path, collected, folder.study)


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
