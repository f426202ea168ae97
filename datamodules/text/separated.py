"""Checks files of separated values before they are read: which separator they use, and whether rows would be lost.

Without these checks, the reader of `datasets` takes a stray quotation mark for the start of a text of many lines, reads
a file with another separator as one column, and takes the first row for the columns' names if there are none.
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
CLASS_SHARE = 0.05  # a value is a class if this share of the rows has it
LINES = 2  # lines within a value that look like rows
LONG_NAME = 5  # words; names of columns are rarely that long

logger = logging.getLogger(__name__)


def reader_options(
    path: Path, usual: str, say: Say, *, streaming: bool = False
) -> dict[str, Any]:
    """Find out how `datasets` must read a file of separated values.

    Args:
        path: the file.
        usual: the separator that its file name extension suggests.
        say: receives cautions, which name the file and the line.
        streaming: look only at the beginning.

    Returns:
        Options for the CSV reader: `sep`, and `quoting` where quotation marks are ordinary characters.

    Raises:
        ValueError: the file is not UTF-8, quotations are ambiguous, a row has more values than there are columns, or
            the first line does not name the columns or gives two of them one name. The message names the file and the
            line.
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
    """A row of a file: its first and last line, counted from 1, and its values."""

    first: int
    last: int
    values: list[str]


class _BrokenQuotation(Exception):
    """Raised where a quotation does not end where its value does."""

    def __init__(self, line: int) -> None:
        self.line = line


@dataclass
class _File:
    """A file of separated values.

    Attributes:
        path: path of the file.
        separator: separator between two values.
        most: number of lines to look at; None: all.
    """

    path: Path
    separator: str
    most: int | None

    def lines(self) -> Iterator[str]:
        """Yield the lines with their endings."""
        with self.path.open(encoding="utf-8-sig", newline="") as lines:
            yield from islice(lines, self.most)

    def rows(self, *, quoted: bool = True, strict: bool = True) -> Iterator[_Row]:
        """Yield the rows, without blank lines.

        Args:
            quoted: whether quotation marks enclose values; otherwise they are ordinary characters.
            strict: whether quotation marks must enclose whole values. Otherwise rows are split as pandas does it.

        Raises:
            _BrokenQuotation: `strict` is set and they do not.
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
        """Tell whether, with quotes as ordinary characters, every non-blank line has one value for each column."""
        lines = filter(str.strip, self.lines())
        return all(line.count(self.separator) == columns - 1 for line in lines)


@dataclass
class _Found:
    """Findings about the rows of a file.

    Attributes:
        separator: separator between two values.
        names: names of the columns.
        sample: the first rows below them.
        short: number of rows with fewer values than columns.
        first_short: the first such row.
        long: the first row with more values than columns.
        all_longer: whether all rows have one value more than there are columns, as R writes them: the first value then
            numbers the row.
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
        """Take the next row into account."""
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
    if first is None:  # the reader reports that the file is empty
        return {"sep": file.separator}
    if "\0" in first:
        raise UserError(
            f"Expected text in UTF-8, but {file.path}:1 contains null bytes, as UTF-16 does. Save it as UTF-8."
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
    """Find the separator: the one that the extension suggests or, if the first line lacks it, one in every line."""
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
    """Read the rows as if quotation marks enclose values; None if they are ordinary characters.

    Args:
        file: file to read.
        quoted_names: whether the names of the columns have quotation marks.
        say: receives a caution.
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
            f"Caution: the quotation marks of {file.path}, as in line {where}, are read as ordinary characters: "
            f"every line is then a row of {len(found.names)} values, which would not hold if they enclosed values."
        )
        return None
    if broken is None:
        return found
    if found.several is not None:
        raise UserError(
            f"Expected quotation marks around whole values in {file.path}, but that in line {broken} ends before its"
            " value does, or never, so the rows are ambiguous. Double the quotation marks "
            'within a value ("") and enclose it, or write the texts as JSON lines.'
        )
    say(
        f"Caution: a quotation in line {broken} of {file.path} ends before its value does. Its quotation marks, and "
        'those of similar cases, are missing from the texts. To keep them, double them ("") and enclose the value.'
    )
    return found


def _check_rows(file: _File, found: _Found, say: Say) -> None:
    """Raise unless every row has as many values as there are columns; caution where rows have fewer."""
    columns = len(found.names)
    if not found.sample:
        raise UserError(
            f"Expected texts in {file.path}, but it has only one line, which is taken for the names of its columns: "
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
            f"Caution: {found.short:,} rows of {file.path} have fewer values than the {columns} columns that its "
            f"first line names; the first such row is in line {found.first_short.first}. Missing values are read as "
            "empty."
        )
    if found.swallowed is not None:
        lines = f"lines {found.swallowed.first} to {found.swallowed.last}"
        say(
            f"Caution: {lines} of {file.path} are read as one row, since "
            "a quotation begins in the first and ends in the last. If they are separate rows, double the "
            'quotation marks ("") and enclose the values that contain them.'
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
            f"Expected a different name for each column of {file.path}, but its first line has {double!r} twice. "
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
    """Tell whether the supposed name of a column is one of its values, as in a file without a header."""
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
