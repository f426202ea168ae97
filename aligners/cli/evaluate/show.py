"""Show the tables and findings of a finished run, and open its report.html.

The page of a run of an earlier version is made now. Nothing is computed anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jsonargparse import ArgumentParser

from aligners.cli.options import bare_parser
from aligners.reports.finished import finished_run
from aligners.reports.page.run import PAGE, write_page
from aligners.reports.publishing import show
from aligners.reports.screen import WhenToOpen, open_where_there_is_a_desktop


@dataclass
class Options:
    """What is shown.

    Args:
        run: Folder of the run.
        open: Whether to open the page in a browser: `auto` where there is a desktop, `true`, or `false`.
    """

    run: Path
    open: WhenToOpen = "auto"


def parser() -> ArgumentParser:
    """The options."""
    return bare_parser(__doc__, "RUN [options]", Options)


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Show and open.

    Raises:
        ValueError: it is no folder of a finished run.
    """
    options = parser.parse_args(words)
    finished = finished_run(options.run)
    show(finished.report)
    page = options.run / PAGE
    if not page.is_file():
        write_page(finished.report, options.run)
    opened = open_where_there_is_a_desktop(page, options.open)
    print(f"\n{'Opened' if opened else 'Report'}: {page}")
