"""The terminal and the desktop: tables and lines of text on screen, and files opened in the browser."""

import os
import sys
import webbrowser
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text

from aligners.errors import visible

ROLE_STYLES = {"ceiling": "green", "floor": "dim"}  # of a row on screen
GAP = "  "  # between columns
WhenToOpen = Literal["auto", "true", "false"]


class Column(NamedTuple):
    """A column: the heading of its group or nothing, its own heading and its cells, and whether they stand right."""

    group: str
    texts: list[str]
    right: bool = True

    @property
    def cells(self) -> list[str]:
        """What stands below the heading."""
        return self.texts[1:]


class SiteTable:
    """A table for any width: where it is wider than the console its columns are split, and each part names the rows.

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
        self.title, self.names = visible(title), len(names)
        self.columns = [Column("", [name], right=False) for name in names]
        self.columns += [
            Column(group, [heading])
            for group, _, heading in (name.rpartition("\n") for name in columns)
        ]
        self.columns += [Column(group, [site]) for group, below in sites.items() for site in below]
        self.styles: list[str] = []

    def add_row(self, *cells: str, style: str | None = None) -> None:
        """Add a row; cells that are left out at its end are empty.

        Args:
            cells: of the first columns.
            style: of the whole row, as rich names it.
        """
        for column, text in zip(
            self.columns, [*cells, *[""] * (len(self.columns) - len(cells))], strict=True
        ):
            column.texts.append(visible(text))
        self.styles.append(style or "")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the title, then the parts of the table, without columns that no row fills."""
        yield Text(f"\n{self.title}", style="bold")
        names, above, width = self.columns[: self.names], list[Column](), options.max_width
        for column in names[:-1]:
            if len({*column.cells}) == 1:
                names.remove(column)
                if column.cells[0]:
                    yield Text(": ".join(column.texts[:2]))
        while names and _width(names) > width // 2:
            above.append(names.pop(0))
        parts = [names]
        filled = [column for column in self.columns[self.names :] if any(column.cells)]
        for _, block in groupby(filled, lambda column: column.group or id(column)):
            whole = [*block]
            fits = _width([*names, *whole]) <= width and any(column.group for column in parts[-1])
            for piece in [whole] if fits else [[column] for column in whole]:
                if len(parts[-1]) > len(names) and _width([*parts[-1], *piece]) > width:
                    parts.append(names)
                parts[-1] = [*parts[-1], *piece]
        for part in parts:
            yield from self._lines(part, len(names), above)

    def _lines(self, part: Sequence[Column], names: int, above: Sequence[Column]) -> Iterator[Text]:
        """The headings of some columns, and the rows that have a value in them."""
        groups, headings, *rows = (GAP.join(texts) for texts in zip(*_padded(part), strict=True))
        yield from map(Text, ("", *filter(str.strip, (groups, headings)), "─" * len(headings)))
        before = ""
        for n, (row, style) in enumerate(zip(rows, self.styles, strict=True), start=1):
            if any(column.texts[n] for column in part[names:]):
                name = ", ".join(column.texts[n] for column in above)
                yield from (Text(line, style) for line in [name] * (name != before) + [row])
                before = name


def _padded(part: Sequence[Column]) -> Iterator[list[str]]:
    """Fill each column with blanks; a group's heading stands above the first of its columns in this part."""
    for before, column in zip([None, *part], part, strict=False):
        texts = ["" if before and before.group == column.group else column.group, *column.texts]
        width = max(map(cell_len, texts))
        blanks = (" " * (width - cell_len(text)) for text in texts)
        yield [
            blank + text if column.right else text + blank
            for blank, text in zip(blanks, texts, strict=True)
        ]


def _width(part: Sequence[Column]) -> int:
    return sum(cell_len(texts[0] + GAP) for texts in _padded(part)) - len(GAP)


def screen() -> Console:
    """Return the terminal, or 120 columns if the output is a file or a pipe."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def say(console: Console, line: str, style: str | None = None) -> None:
    """Print a line of text: folded on a terminal, whole in a file or a pipe."""
    soft_wrap = not console.is_terminal
    console.print(
        visible(line), style=style, highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap
    )


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
    return sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
