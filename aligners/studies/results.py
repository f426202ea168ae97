"""Reads what a cell has found piece by piece: a comparison of many models has millions of rows."""

import json
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, TextIO

BLOCK = 2**20  # characters that are read at a time
SPACE, ENDS = re.compile(r"\s*"), re.compile(r"[\s,:\]}]")
DECODER = json.JSONDecoder()


def about(path: Path) -> dict[str, Any]:
    """What a result says before its rows: the cell, how long it took, versions, `meta`."""
    return dict(takewhile(lambda entry: entry[0] != "rows", _entries(path)))


def rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of all tables of a result, one by one, each with the name of its table."""
    return ((name, row) for name, row in _entries(path, listed=True) if name != "findings")


def _entries(path: Path, *, listed: bool = False) -> Iterator[tuple[str, Any]]:
    """The entries of a JSON object; of a list its name alone, or if `listed` its items and no other entries."""
    with path.open(encoding="utf-8") as file:
        text = _Text(file)
        text.passes("{")
        while not text.passes("}"):
            name = text.value()
            text.passes(":")
            if not text.passes("["):
                value = text.value()
                if not listed:
                    yield name, value
            else:
                if not listed:
                    yield name, []
                while not text.passes("]"):
                    item = text.value()
                    if listed:
                        yield name, item
                    text.passes(",")
            text.passes(",")


class _Text:
    """JSON of which a part is in memory."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._at = file, "", 0

    def passes(self, character: str) -> bool:
        """Go past a character, if it comes next, and past white space before it."""
        while (at := SPACE.match(self._text, self._at).end()) == len(self._text) and self._read():  # type: ignore[union-attr]
            pass
        found = self._text.startswith(character, at)
        self._at = at + found * len(character)
        return found

    def value(self) -> Any:
        """The value that comes next."""
        self.passes("")
        while True:
            try:
                value, end = DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError:  # cut off, unless the file ends here
                if not self._read():
                    raise
            else:
                if ENDS.match(self._text, end) or not self._read():  # a number may go on
                    self._at = end
                    return value

    def _read(self) -> bool:
        block = self._file.read(BLOCK)
        if block:
            self._text, self._at = self._text[self._at :] + block, 0
        return bool(block)
