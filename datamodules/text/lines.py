"""Lines of local text files, whose bytes are UTF-8 with or without a byte order mark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["numbered_lines"]


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Read a file line by line: the number of each line, counted from 1, and the line without its ending.

    Raises:
        ValueError: a line is not UTF-8; names file and line.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"Expected text in UTF-8, but {path}:{number} is not: {error.reason}, 0x{line[error.start]:02x}. "
                    "Save the file as UTF-8."
                ) from error
            yield number, text.rstrip("\r\n")
