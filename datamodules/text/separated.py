"""Looks through files of separated values before they are read: what separates them, and whether no row is lost.

The reader of `datasets` takes a stray quotation mark for the beginning of a text of many lines, a file with another
separator for one column, and the first row of a file without names of columns for these names.
"""

from __future__ import annotations

import csv
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from aligners.datamodules.text.annotated.annotated_files import numbered_lines
from aligners.datamodules.text.labels import Say
from aligners.errors import UserError

SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "vertical bars"}
QUOTE = '"'
COMPARED = 1_000  # rows with which the first line is compared
STREAMED = 100_000  # lines of a stream that are looked at
CLASS_SHARE = 0.05  # a value is a class if so many of the rows have it
LINES = 2  # within a value that look like rows
LONG_NAME = 5  # words; names of columns are rarely so long

logger = logging.getLogger(__name__)


def reader_options(
    path: Path, usual: str, say: Say, *, streaming: bool = False
) -> dict[str, Any]:
    """Find out how `datasets` has to read a file of separated values.

    Args:
        path: the file.
        usual: the separator that its ending promises.
        say: takes cautions, which name file and line.
        streaming: look at the beginning only.

    Returns:
        Options of the reader of CSV: `sep`, and `quoting` where quotation marks are characters like any other.

    Raises:
        ValueError: it is not UTF-8, quotations cannot be told from texts, a row has more values than there are columns,
            or the first line does not name the columns, or two of them alike. Names file and line.
    """
    limit = csv.field_size_limit(sys.maxsize)
    try:
        return _look(_File(path, usual, STREAMED if streaming else None), say)
    except UnicodeDecodeError:
        for _ in numbered_lines(path):  # names the line
            pass
        raise
    finally:
        csv.field_size_limit(limit)


class _Row(NamedTuple):
    """A row of a file: the lines where it begins and ends, counted from 1, and its values."""

    first: int
    last: int
    values: list[str]


class _BrokenQuotation(Exception):
    """A quotation does not end where its value does."""

    def __init__(self, line: int) -> None:
        self.line = line


@dataclass
class _File:
    """A file of separated values.

    Attributes:
        path: where it is.
        separator: between two values.
        most: lines that are looked at; None: all.
    """

    path: Path
    separator: str
    most: int | None

    def lines(self) -> Iterator[str]:
        """The lines with their endings."""
        with self.path.open(encoding="utf-8-sig", newline="") as lines:
            yield from islice(lines, self.most)

    def rows(self, *, quoted: bool = True, strict: bool = True) -> Iterator[_Row]:
        """The rows, without blank lines.

        Args:
            quoted: whether quotation marks enclose values; otherwise they are characters like any other.
            strict: whether they must enclose whole values. Otherwise the rows are those that pandas reads.

        Raises:
            _BrokenQuotation: they do not.
        """
        reader = csv.reader(
            self.lines(),
            delimiter=self.separator,
            quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE,
            strict=strict and quoted,
        )
        line = 0
        while True:
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if reader.line_num == self.most:  # what follows was not looked at
                    return
                raise _BrokenQuotation(line + 1) from error
            if any(map(str.strip, values)):
                yield _Row(line + 1, reader.line_num, values)
            line = reader.line_num

    def even_without_quotes(self, columns: int) -> bool:
        """Whether every line that is not blank has as many values as there are columns, if quotes mean nothing."""
        lines = filter(str.strip, self.lines())
        return all(line.count(self.separator) == columns - 1 for line in lines)


@dataclass
class _Found:
    """What was found in the rows of a file.

    Attributes:
        separator: between two values.
        names: of the columns.
        sample: the first rows below them.
        short: number of rows with fewer values than columns.
        first_short: the first of them.
        long: the first row with more.
        all_longer: whether all rows have one more, as R writes them: the first one then numbers the rows.
        repeated: the line that repeats the names.
        several: the first row that takes several lines.
        swallowed: the first row with a value whose inner lines look like rows of their own.
    """

    separator: str
    names: list[str]
    sample: list[_Row] = field(default_factory=list)
    short: int = 0
    first_short: _Row | None = None
    long: _Row | None = None
    all_longer: bool = True
    repeated: int | None = None
    several: _Row | None = None
    swallowed: _Row | None = None

    def add(self, row: _Row) -> None:
        """Look at the next row."""
        excess = len(row.values) - len(self.names)
        if len(self.sample) < COMPARED:
            self.sample.append(row)
        if excess < 0:
            self.short += 1
            self.first_short = self.first_short or row
        if excess > 0:
            self.long = self.long or row
        if excess != 1 or not row.values[0].strip().isdigit():
            self.all_longer = False
        if len(self.names) > 1 and row.values == self.names:
            self.repeated = self.repeated or row.first
        if row.last > row.first:
            self.several = self.several or row
            if any(map(self._looks_like_rows, row.values)):
                self.swallowed = self.swallowed or row

    def _looks_like_rows(self, value: str) -> bool:
        inner = value.splitlines()[1:-1]
        if len(inner) < LINES or len(self.names) == 1:
            return False
        return all(line.count(self.separator) == len(self.names) - 1 for line in inner)


def _look(file: _File, say: Say) -> dict[str, Any]:
    first = next(filter(str.strip, file.lines()), None)
    if first is None:  # the reader says that the file is empty
        return {"sep": file.separator}
    if "\0" in first:
        raise UserError(
            f"Expected text in UTF-8, but {file.path}:1 has zero bytes, as UTF-16 does. Save it as UTF-8."
        )
    usual = file.separator
    file.separator = _separator(file, first)
    if file.separator != usual:
        logger.warning(
            "%s is read with %s between its columns: its first line has no %s.",
            file.path, SEPARATORS[file.separator], SEPARATORS[usual],
        )  # fmt: skip
    options: dict[str, Any] = {"sep": file.separator}
    found = _quoted(file, QUOTE in first, say)
    if found is None:
        options["quoting"] = csv.QUOTE_NONE
        found = _found(file, quoted=False)
    _check_rows(file, found, say)
    _check_names(file, found, say)
    return options


def _separator(file: _File, first: str) -> str:
    """The separator of a file: what its ending promises or, if its first line has none, the one of all its lines."""
    if file.separator in first:
        return file.separator
    for other in SEPARATORS:
        if other not in first:
            continue
        candidate = _File(file.path, other, file.most)
        try:
            widths = {len(row.values) for row in candidate.rows()}
        except _BrokenQuotation:
            widths = {len(row.values) for row in candidate.rows(quoted=False)}
        if len(widths) == 1 and widths != {1}:
            return other
    return file.separator


def _found(file: _File, *, quoted: bool = True, strict: bool = True) -> _Found:
    rows = file.rows(quoted=quoted, strict=strict)
    found = _Found(file.separator, [name.strip() for name in next(rows).values])
    for row in rows:
        found.add(row)
    return found


def _quoted(file: _File, quoted_names: bool, say: Say) -> _Found | None:
    """What there is if quotation marks enclose values; None if they are characters like any other.

    Args:
        file: which one.
        quoted_names: whether the names of the columns have quotation marks.
        say: takes a caution.
    """
    broken = None
    try:
        found = _found(file)
    except _BrokenQuotation as error:
        broken = error.line
        found = _found(file, strict=False)
    if broken is None and found.several is None:
        return found
    where = found.several.first if broken is None and found.several else broken
    if (
        not quoted_names
        and len(found.names) > 1
        and file.even_without_quotes(len(found.names))
    ):
        say(
            f"Caution: the quotation marks of {file.path}, as in line {where}, are read as characters like any other: "
            f"so every line is a row of {len(found.names)} values, which with quotations it is not."
        )
        return None
    if broken is None:
        return found
    if found.several is not None:
        raise UserError(
            f"Expected quotation marks around whole values in {file.path}, but that in line {broken} ends before its "
            "value does, or never, so that it cannot be told which lines are one row. Double the quotation marks "
            'within a value ("") and enclose it, or write the texts as JSON lines.'
        )
    say(
        f"Caution: a quotation in line {broken} of {file.path} ends before its value does. Its marks, and those of "
        'others like it, are missing in the texts. To keep them, double them ("") and enclose the value.'
    )
    return found


def _check_rows(file: _File, found: _Found, say: Say) -> None:
    """Raise unless every row has as many values as there are columns; say where they are fewer."""
    columns = len(found.names)
    if not found.sample:
        raise UserError(
            f"Expected texts in {file.path}, but it has one line only, which is taken for the names of its columns: "
            f"{', '.join(found.names)}."
        )
    if found.long is not None and not found.all_longer:
        raise UserError(
            f"Expected {columns} values in each row of {file.path}, as its first line names {columns} columns, but "
            f"line {found.long.first} has {len(found.long.values)}. Enclose values that hold "
            f"{SEPARATORS[file.separator]} in quotation marks, or name all columns."
        )
    if found.short and found.first_short is not None:
        say(
            f"Caution: {found.short:,} rows of {file.path} have fewer values than the {columns} columns that its first "
            f"line names, the first in line {found.first_short.first}. What is missing is empty."
        )
    if found.swallowed is not None:
        lines = f"lines {found.swallowed.first} to {found.swallowed.last}"
        say(
            f"Caution: {lines} of {file.path} are read as one row, since "
            "a quotation begins in the first and ends in the last. Should they be rows of their own, double the "
            'quotation marks ("") and enclose the values that have any.'
        )
    if found.repeated is not None:
        raise UserError(
            f"Expected the names of the columns in the first line of {file.path} only, but line {found.repeated} "
            "repeats them. Remove that line, and any other like it."
        )


def _check_names(file: _File, found: _Found, say: Say) -> None:
    """Raise unless the first line names the columns, rather than being a row of its own."""
    names = [name for name in found.names if name]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise UserError(
            f"Expected a name of its own for each column of {file.path}, but two of its first line are {double!r}. "
            "Rename one of them."
        )
    if names == [
        str(number) for number in range(len(names))
    ]:  # as pandas names columns
        return
    for place, name in enumerate(found.names):
        values = [row.values[place] for row in found.sample if place < len(row.values)]
        if name and _is_value(name, values):
            example = file.separator.join(("text", "label"))
            raise UserError(
                f"Expected the names of the columns in the first line of {file.path}, but {name!r} is a value that "
                f"other rows have in that column, too. Write names above it, such as {example!r}."
            )
        if len(name.split()) >= LONG_NAME and not name.endswith("?"):
            say(
                f"Caution: the first line of {file.path} is taken for the names of its columns, but {name!r} looks "
                "like a text, which is then lost. If it is one, write names above it, such as 'text'."
            )


def _is_value(name: str, values: list[str]) -> bool:
    """Whether what should be the name of a column is one of its values, as in a file that names no columns."""
    count = sum(value.strip() == name for value in values)
    if count >= 2 and count >= CLASS_SHARE * len(values):
        return True
    return (
        "." in name and _is_number(name) and all(map(_is_number, filter(None, values)))
    )


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
