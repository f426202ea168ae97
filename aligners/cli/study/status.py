"""Count a study's cells by kind and state, and list those that failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jsonargparse import ArgumentParser
from rich.table import Table

from aligners.cli.options import bare_parser
from aligners.reports.screen import screen, site_table
from aligners.studies.folder import ERROR, STATES, StudyFolder


@dataclass
class Options:
    """The study.

    Args:
        folder: Of the study, such as runs/NAME.
    """

    folder: Path


def folder_parser(description: str | None) -> ArgumentParser:
    """The options of every command that is about a study's folder."""
    return bare_parser(description, "FOLDER [options]", Options)


def parser() -> ArgumentParser:
    """The options."""
    return folder_parser(__doc__)


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Show the table and the failures."""
    folder = StudyFolder(parser.parse_args(words).folder)
    screen().print(status_table(folder))
    for line in failures(folder):
        print(line)


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
