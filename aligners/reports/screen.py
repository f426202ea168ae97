"""The terminal and the desktop: tables and lines of text on screen, and files opened in the browser."""

import os
import sys
import webbrowser
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

ROLE_STYLES = {"ceiling": "green", "floor": "dim"}  # of a row on screen
WhenToOpen = Literal["auto", "true", "false"]


class TitledTable(Table):
    """A table whose title may be wider than its columns; Rich would fold it.

    Args:
        title: shown above the table, at the left.
    """

    def __init__(self, title: str) -> None:
        super().__init__(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        self._over = title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the title, then the table."""
        yield Text(f"\n{self._over}", style="bold")
        yield from super().__rich_console__(console, options)


def title_of(table: Table) -> str:
    """The title of a table, of Rich's own or of ours; empty if it has none."""
    return str(table._over if isinstance(table, TitledTable) else table.title or "")


def site_table(
    title: str, names: Sequence[str], columns: Sequence[str], sites: Mapping[str, Iterable[str]]
) -> TitledTable:
    """Make an empty table with sites across.

    Args:
        title: shown above the table.
        names: headings of the first columns, which hold text; the first of them may be folded.
        columns: headings of the numeric columns between these and the sites.
        sites: heading -> the sites below it; one empty heading means no line of headings.
    """
    over = "\n" if any(sites) else ""
    table = TitledTable(title)
    for place, name in enumerate(names):
        table.add_column(f"{over}{name}", overflow="fold", no_wrap=place > 0)
    for column in columns:
        table.add_column(column if "\n" in column else f"{over}{column}", justify="right", no_wrap=True)
    for heading, below in sites.items():
        for place, site in enumerate(below):
            above = heading if place == 0 else ""
            table.add_column(f"{above}\n{site}" if over else site, justify="right", no_wrap=True)
    return table


def screen() -> Console:
    """Return the terminal, or 120 columns if the output is a file or a pipe."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def say(console: Console, line: str, style: str | None = None) -> None:
    """Print a line of text: folded on a terminal, whole in a file or a pipe."""
    console.print(line, style=style, highlight=False, soft_wrap=not console.is_terminal)


def open_where_there_is_a_desktop(path: Path, wanted: WhenToOpen = "auto") -> bool:
    """Open a file in the browser, and tell whether it was.

    Args:
        path: of the file.
        wanted: `auto`: where a person sits at a desktop; `true`: wherever a browser is found; `false`: never.
    """
    if wanted == "false" or (wanted == "auto" and not _desktop()):
        return False
    return webbrowser.open(path.resolve().as_uri())


def _desktop() -> bool:
    """Whether the process has a terminal, on this machine, and a display."""
    if not sys.stdout.isatty() or os.environ.get("SSH_CONNECTION"):
        return False
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
