"""Collect the results of a study's cells, and make its tables and figures."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from aligners.cli.study.status import folder_parser
from aligners.reports.study.report import report
from aligners.studies.collecting import collect, tables
from aligners.studies.folder import StudyFolder


def parser() -> ArgumentParser:
    """The options."""
    return folder_parser(__doc__)


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Collect and report."""
    folder = StudyFolder(parser.parse_args(words).folder)
    collect(folder)
    report_if_possible(folder)


def report_if_possible(folder: StudyFolder) -> None:
    """Make the report, if there is anything to report on."""
    found = tables(folder)
    if found:
        report(folder.path, found, folder.study)
