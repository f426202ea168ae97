"""`study.py status`: how far a study is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from aligners.cli.options import add_traceback
from aligners.reports.screen import screen
from aligners.studies.folder import StudyFolder
from aligners.studies.status import failures, status_table

__all__ = ["folder_parser", "parser", "run"]


def folder_parser(description: str) -> ArgumentParser:
    """The options of every command that is about a study's folder."""
    made = ArgumentParser(description=description, usage="%(prog)s FOLDER [options]")
    made.add_argument("folder", type=Path, help="Of the study, such as runs/NAME.")
    add_traceback(made)
    return made


def parser() -> ArgumentParser:
    """The options."""
    return folder_parser("Count a study's cells by kind and state, and list those that failed.")


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Show the table and the failures."""
    folder = StudyFolder(parser.parse_args(words).folder)
    screen().print(status_table(folder))
    for line in failures(folder):
        print(line)
