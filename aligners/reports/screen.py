"""The terminal and the desktop: tables and lines of text on screen, and files opened in the browser."""

import os
import sys
import webbrowser
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text

from aligners.errors import visible

ROLE_STYLES = {"ceiling": "green", "floor": "dim"}  # of a row on screen
QUIET = "bright_black"  # of a cell that says nothing
GAP = "  "  # between columns
WhenToOpen = Literal["auto", "true", "false"]


class Column(NamedTuple):
    """A column: the heading of its group, if any, its own heading and cells, and whether they are right-aligned."""

    group: str
    texts: list[str]
    right: bool = True

    @property
    def cells(self) -> list[str]:
        """The cells below the heading."""
        return self.texts[1:]


class SiteTable:
    """A table for any width: if it is wider than the console, its columns are split, and parts repeat the rows' names.

    A name that is the same in all rows stands once above the table. Names that would take more than half of the width
    stand on lines of their own. Nothing is cut.

    Args:
        title: shown above the table, at the left.
        names: headings of the first columns, which hold text.
        columns: headings of the numeric columns between these and the sites; a line above one is its group.
        sites: heading of a group of columns, or nothing -> the sites below it.
    """

    def __init__(
        self,
        title: str,
        names: Sequence[str],
        columns: Sequence[str],
        sites: Mapping[str, Iterable[str]],
    ) -> None:
        self.title = visible(title)
        self.names = len(names)
        self.columns = [Column("", [name], right=False) for name in names]
        for name in columns:
            group, _, heading = name.rpartition("\n")
            self.columns.append(Column(group, [heading]))
        for group, below in sites.items():
            self.columns += [Column(group, [site]) for site in below]
        self.styles: list[str] = []
        self.quiet: list[frozenset[int]] = []

    def add_row(
        self, *cells: str, style: str | None = None, quiet: Iterable[int] = ()
    ) -> None:
        """Add a row; cells that are left out at its end are empty.

        Args:
            cells: cells of the first columns.
            style: of the whole row, as rich names it.
            quiet: places of the cells that are grey.
        """
        left_out = [""] * (len(self.columns) - len(cells))
        for column, text in zip(self.columns, [*cells, *left_out], strict=True):
            column.texts.append(visible(text))
        self.styles.append(style or "")
        self.quiet.append(frozenset(quiet))

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[Text]:
        """Yield the title, then the parts of the table, without columns that no row fills."""
        yield Text(f"\n{self.title}", style="bold")
        names = self.columns[: self.names]
        for column in names[:-1]:
            if len(set(column.cells)) == 1:  # the same in all rows
                names.remove(column)
                if column.cells[0]:
                    yield Text(f"{column.texts[0]}: {column.cells[0]}")
        above = []
        while names and _width(names) > options.max_width // 2:
            above.append(names.pop(0))
        for part in self._parts(names, options.max_width):
            yield from self._lines(part, len(names), above)

    def _parts(self, names: list[Column], width: int) -> list[list[Column]]:
        """Share the columns that some row fills out to parts that fit; a group stays together if it can."""
        parts = [names]
        for group in self._groups():
            pieces = [[column] for column in group]
            beside_group = any(column.group for column in parts[-1])
            if beside_group and _width([*names, *group]) <= width:
                pieces = [group]
            for piece in pieces:
                if len(parts[-1]) > len(names) and _width([*parts[-1], *piece]) > width:
                    parts.append(names)
                parts[-1] = [*parts[-1], *piece]
        return parts

    def _groups(self) -> list[list[Column]]:
        """Neighbours of one group among the columns that some row fills; a column without a group is alone."""
        groups: list[list[Column]] = []
        for column in self.columns[self.names :]:
            if not any(column.cells):
                continue
            if column.group and groups and groups[-1][0].group == column.group:
                groups[-1].append(column)
            else:
                groups.append([column])
        return groups

    def _lines(
        self, part: Sequence[Column], names: int, above: Sequence[Column]
    ) -> Iterator[Text]:
        """The headings of some columns, and the rows that have a value in them."""
        padded = list(zip(*_padded(part), strict=True))
        lines = [GAP.join(texts) for texts in padded]
        groups, headings, *rows = lines
        yield Text("")
        for line in (groups, headings):
            if line.strip():
                yield Text(line)
        yield Text("─" * len(headings))
        before = ""
        for place, (row, style) in enumerate(zip(rows, self.styles, strict=True)):
            if not any(column.cells[place] for column in part[names:]):
                continue
            name = ", ".join(column.cells[place] for column in above)
            if name != before:
                yield Text(name, style)
            shown = Text(row, style)
            self._quieten(shown, part, place, padded[place + 2])
            yield shown
            before = name

    def _quieten(
        self, line: Text, part: Sequence[Column], place: int, texts: Sequence[str]
    ) -> None:
        """Make the grey cells of a row grey."""
        start = 0
        for column, text in zip(part, texts, strict=True):
            end = start + len(text)
            if any(self.columns[number] is column for number in self.quiet[place]):
                line.stylize(QUIET, start, end)
            start = end + len(GAP)


def _padded(part: Sequence[Column]) -> list[list[str]]:
    """Fill each column with blanks; a group's heading stands above the first of its columns in this part."""
    padded = []
    before = None
    for column in part:
        texts = [column.group, *column.texts]
        if column.group == before:
            texts[0] = ""
        before = column.group
        width = max(map(cell_len, texts))
        filled = []
        for text in texts:
            blank = " " * (width - cell_len(text))
            if column.right:
                filled.append(blank + text)
            else:
                filled.append(text + blank)
        padded.append(filled)
    return padded


def _width(part: Sequence[Column]) -> int:
    """Return how many cells of the console the columns take."""
    width = -len(GAP)
    for texts in _padded(part):
        width += cell_len(texts[0] + GAP)
    return width


def screen() -> Console:
    """Return the terminal, or 120 columns if the output is a file or a pipe."""
    if sys.stdout.isatty():
        return Console()
    return Console(width=120)


def say(console: Console, line: str, style: str | None = None) -> None:
    """Print a line of text: folded on a terminal, whole in a file or a pipe."""
    console.print(
        visible(line),
        style=style,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=not console.is_terminal,
    )


def open_where_there_is_a_desktop(path: Path, wanted: WhenToOpen = "auto") -> bool:
    """Open a file in the browser, and tell whether it was.

    Args:
        path: path of the file.
        wanted: `auto`: where a person sits at a desktop; `true`: wherever a browser is found; `false`: never.
    """
    if wanted == "false" or (wanted == "auto" and not _desktop()):
        return False
    return webbrowser.open(path.resolve().as_uri())


def _desktop() -> bool:
    """Tell whether the process has a terminal, on this machine, and a display."""
    if not sys.stdout.isatty() or os.environ.get("SSH_CONNECTION"):
        return False
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
