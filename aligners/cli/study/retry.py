"""Run the failed cells of a study once more, from their beginning, and what needs them."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from aligners.cli.study.run import Running, go
from aligners.cli.study.status import folder_parser
from aligners.studies.folder import StudyFolder
from aligners.studies.spec import read_study


def parser() -> ArgumentParser:
    """The options."""
    made = folder_parser(__doc__)
    made.add_class_arguments(Running, None)
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Run them."""
    options = parser.parse_args(words)
    go(read_study(StudyFolder(options.folder).study), options.folder, options, again=True)
