"""Logs of what a process prints: written line by line, so that they are there however the process ends."""

import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from aligners.files.atomic import open_own

RUN_LOG = "run.log"  # in the folder of every run
# Not for a log: colours, what moves a bar, and the frames of bars.
ON_SCREEN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r|.*━.*\n?")
# By their names: a process has one run at a time, which may be a step of a demo.
_logs: dict[str, TextIO] = {}


class Logged:
    """A stream whose lines go to the open logs as well, without the frames of bars."""

    def __init__(self, screen: TextIO) -> None:
        self._screen = screen

    def write(self, text: str) -> int:
        """Write to the stream and to the logs."""
        self.log(ON_SCREEN.sub("", text))
        return self._screen.write(text)

    def log(self, text: str) -> None:
        """Write to the logs alone, as `aligners.progress` does with a bar's lines; a full disk ends no run here."""
        for log in _logs.values():
            with suppress(OSError):
                log.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._screen, name)


def watch_streams() -> None:
    """From now on, what is written to the output and to that of errors can go to logs.

    Call it before packages are imported that keep the streams for their own messages.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, Logged):
            setattr(sys, name, Logged(stream))


def log_to(path: Path) -> None:
    """From now on, write what this process prints to a file as well, after what is there.

    A log of the same name, of an earlier run, ends.

    Raises:
        OSError: it cannot be written, or is a link to another file.
    """
    watch_streams()
    path.parent.mkdir(parents=True, exist_ok=True)
    end_log(path.name)
    _logs[path.name] = open_own(path, "a")


def end_log(name: str) -> None:
    """Write no more to the log of this name, if there is one."""
    if name in _logs:
        _logs.pop(name).close()
