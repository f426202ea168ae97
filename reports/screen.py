"""The screen: tables and lines of words."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

__all__ = ["TitledTable", "say", "screen", "site_table"]


class TitledTable(Table):
    """A table of a report whose title may be wider than its columns; Rich alone would fold it.

    Args:
        title: over the table, to its left.
    """

    def __init__(self, title: str) -> None:
        super().__init__(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        self._over = title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The title, then the table."""
        yield Text(f"\n{self._over}", style="bold")
        yield from super().__rich_console__(console, options)


def site_table(
    title: str, names: Sequence[str], columns: Sequence[str], sites: Mapping[str, Sequence[str]]
) -> TitledTable:
    """Make an empty table with sites across.

    Args:
        title: over the table.
        names: headings of the first columns, which hold words; the first of them may be folded.
        columns: headings of the columns of numbers between these and the sites.
        sites: heading -> the sites below it; with one empty heading there is no line of headings.
    """
    over = "\n" if any(sites) else ""
    table = TitledTable(title)
    for place, name in enumerate(names):
        table.add_column(f"{over}{name}", overflow="fold", no_wrap=place > 0)
    for column in columns:
        table.add_column(column if "\n" in column else f"{over}{column}", justify="right", no_wrap=True)
    for heading, names in sites.items():
        for place, site in enumerate(names):
            above = heading if place == 0 else ""
            table.add_column(f"{above}\n{site}" if over else site, justify="right", no_wrap=True)
    return table


def screen() -> Console:
    """The terminal, or 120 columns if the output is a file or a pipe."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def say(console: Console, line: str, style: str | None = None) -> None:
    """Print a line of words: folded on a terminal, whole in a file or a pipe."""
    console.print(line, style=style, highlight=False, soft_wrap=not console.is_terminal)
