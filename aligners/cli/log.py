"""A log of what a process prints: written line by line, so that it is there however the process ends."""

import re
import sys
from pathlib import Path
from typing import Any, TextIO

# Not for a log: colours, what moves a bar, and the frames of bars.
ON_SCREEN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r|.*━.*\n?")


class Logged:
    """A stream whose lines go to a log as well, without the frames of bars.

    Attributes:
        log: the file; a bar's lines go there alone, see `aligners.progress`.
    """

    def __init__(self, screen: TextIO, log: TextIO) -> None:
        self._screen, self.log = screen, log

    def write(self, text: str) -> int:
        """Write to both."""
        self.log.write(ON_SCREEN.sub("", text))
        return self._screen.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._screen, name)


def log_to(path: Path) -> None:
    """From now on, write what this process prints, to its output and to that of errors, to a file as well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("a", encoding="utf-8", buffering=1)
    sys.stdout, sys.stderr = (Logged(stream, log) for stream in (sys.stdout, sys.stderr))
