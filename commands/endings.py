"""How a command ends that cannot go on: with one message and a status, or with a traceback."""

from __future__ import annotations

import dis
import errno
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NoReturn

__all__ = ["MENDABLE", "early_endings", "what_to_mend"]

MENDABLE, INTERRUPTED, TERMINATED = 2, 130, 143  # exit statuses: of wrong options, too; as shells have them
OURS = {"aligners", "callbacks", "commands", "datamodules", "finetuning", "frozen", "reports", "similarity", "storage"}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PATIENCE = 10.0  # seconds in which the first rank has ended too, if it failed alike


@contextmanager
def early_endings(*, traceback: bool = False) -> Iterator[None]:
    """End the process with a message and a status on Ctrl-C, SIGTERM, and errors that the user can mend.

    Of several ranks only the first speaks. Another one does so if its error is its own: it waits and sees whether the
    first ends. All other errors are our own fault, and leave with their traceback.

    Args:
        traceback: whether the user's errors leave with theirs as well.
    """
    parent = os.getppid()  # the first rank, if Lightning has started this one
    try:
        yield
    except KeyboardInterrupt:
        _end("Stopped by Ctrl-C.", INTERRUPTED, parent)
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning's way out
            _end("Stopped by Ctrl-C.", INTERRUPTED, parent)
        if type(end).__name__ == "SIGTERMException":  # Lightning's, too: an exit without a status
            _end("Stopped by SIGTERM.", TERMINATED, parent)
        raise
    except Exception as error:
        message = what_to_mend(error)
        if message is None or traceback:
            raise
        _end(f"error: {message}", MENDABLE, parent)


def what_to_mend(error: Exception) -> str | None:
    """What to tell the user about an error; None if it is our own fault.

    The user can mend what our code refuses, Trainer options that Lightning refuses, and files that cannot be read or
    written.
    """
    if isinstance(error, ValueError) and _refused_here(error.__traceback__):
        return str(error)
    if type(error).__name__ == "MisconfigurationException":
        return str(error)
    if isinstance(error, OSError) and (error.filename is not None or error.errno in FULL):
        place = "" if error.filename is None else f" {error.filename}"
        return f"Cannot read or write{place}: {error.strerror}."
    return None


def _refused_here(place: TracebackType | None) -> bool:
    """Whether an error comes from a `raise` of our own, and not from a library or a function written in C."""
    if place is None:
        return False
    while place.tb_next is not None:
        place = place.tb_next
    room = place.tb_frame.f_globals["__name__"].split(".")[0]
    return room in OURS and place.tb_frame.f_code.co_code[place.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _end(message: str, status: int, parent: int) -> NoReturn:
    if _rank() == 0:
        _stop_further_ranks()
        print(message, file=sys.stderr)
    elif not _ends(parent) and status == MENDABLE:
        print(f"On rank {_rank()}: {message}", file=sys.stderr)
    sys.exit(status)


def _rank() -> int:
    """The rank of this process, as its environment has it: Lightning may not be imported yet."""
    names = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def _ends(parent: int) -> bool:
    """Wait for the process that started this one to end; whether it has."""
    until = time.monotonic() + PATIENCE
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(0.1)
    return os.getppid() != parent


def _stop_further_ranks() -> None:
    """End the processes that Lightning has started: without the first they would wait for it, or fail in words."""
    for thread in threading.enumerate():
        for process in getattr(thread, "_child_processes", ()):  # of the thread that watches them
            process.kill()
