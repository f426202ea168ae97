"""Write the results of all finished cells into one table of each kind, Parquet and CSV."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from aligners.cli.study.status import folder_parser
from aligners.studies.collecting import collect
from aligners.studies.folder import StudyFolder


def parser() -> ArgumentParser:
    """The options."""
    return folder_parser(__doc__)


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Write the tables."""
    for file in collect(StudyFolder(parser.parse_args(words).folder)).values():
        print(file)
