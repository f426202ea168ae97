"""Logs of what a process prints: written line by line, so that nothing is lost however the process ends."""

import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from aligners.files.atomic import open_own

RUN_LOG = "run.log"  # in the folder of every run
# Left out of a log: colours, cursor movements, and the frames of bars.
ON_SCREEN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r|.*━.*\n?")
# Open logs by name: a process has one run at a time, which may be a step of a demo.
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
        """Write only to the logs, as `aligners.progress` does with a bar's lines; a full disk does not end the run."""
        for log in _logs.values():
            with suppress(OSError):
                log.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._screen, name)


def watch_streams() -> None:
    """Let what is written to standard output and standard error go to logs from now on.

    Call it before importing packages that keep a stream for their own messages.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, Logged):
            setattr(sys, name, Logged(stream))


def log_to(path: Path) -> None:
    """From now on, also append what this process prints to a file.

    This ends an earlier run's log of the same name.

    Raises:
        OSError: it cannot be written, or is a link to another file.
    """
    watch_streams()
    path.parent.mkdir(parents=True, exist_ok=True)
    end_log(path.name)
    _logs[path.name] = open_own(path, "a")


def end_log(name: str) -> None:
    """Stop writing to the log of this name, if there is one."""
    if name in _logs:
        _logs.pop(name).close()
