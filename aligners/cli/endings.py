"""How a command ends early: with one message and an exit status, or with a traceback."""

import errno
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from aligners.errors import UserError, visible

# Exit statuses: jsonargparse's for wrong options, and those of shells.
MENDABLE, INTERRUPTED, TERMINATED = 2, 130, 143
ENDING = (signal.SIGTERM, signal.SIGHUP)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PATIENCE = 10.0  # seconds to wait, in which a first rank with the same error has ended
LONGEST_EXIT = 30.0  # seconds after a signal, as W&B may wait for itself for ever if it is stopped while starting
_resuming: list[str] = []  # what the user can do once a signal has ended this process


class Terminated(SystemExit):
    """Raised when SIGTERM, or the closing of the terminal, ends what is running."""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM or a closed terminal within this context; a second signal ends the process.

    Every loop ends so, Lightning's and our own. Where a step must not be cut in two, `callbacks.checkpoint` holds
    the signals back. A signal that is ignored (`nohup`), or that has another handler already, is left alone. In the
    main thread alone; elsewhere nothing changes.
    """

    def end(number: int, _: Any) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)
        raise Terminated(128 + number)

    main = threading.current_thread() is threading.main_thread()
    ours = [
        number
        for number in ENDING
        if main and signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def goes_on_with(
    options: Callable[[], Mapping[str, object] | None], words: str = "To resume"
) -> Iterator[None]:
    """Context in which the message after a signal, or a full disk, gives the command that resumes.

    Args:
        options: returns the options that differ from what was typed, by name; None stands for an option to leave out.
            If it is empty, there is nothing to resume.
        words: what that command is for.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, OSError) as error:
        if isinstance(error, OSError) and error.errno not in FULL:
            raise
        changed = options()
        if changed is not None and not _resuming:
            _resuming.append(f"{words}, run\n  {_typed_with(changed)}")
        raise


def _typed_with(changed: Mapping[str, object]) -> str:
    """Return the command line of this process, with other values for some options."""
    script, *words = sys.argv
    names = {f"--{name}" for name in changed}
    kept, before = list[str](), ""
    for word in words:
        if before not in names and word.partition("=")[0] not in names:
            kept.append(word)
        before = word
    for name, value in changed.items():
        if value is not None:
            kept += [f"--{name}", str(value)]
    if not script.endswith(".py"):
        return shlex.join([os.path.basename(script), *kept])
    active = os.path.dirname(shutil.which("python") or "") == os.path.dirname(
        sys.executable
    )
    return shlex.join(["python" if active else sys.executable, script, *kept])


@contextmanager
def early_endings(
    *, traceback: bool = False, again: str | None = None
) -> Iterator[None]:
    """End the process with a message and an exit status on Ctrl-C, SIGTERM, and errors that the user can fix.

    All other errors are our own fault and keep their traceback. Of several ranks, only the first reports. Another rank
    first waits to see whether the first one ends too, and reports only if it does not.

    Args:
        traceback: whether errors that the user can fix show their traceback, too.
        again: what the user can do after a signal. Default: what `goes_on_with` gives.
    """
    _resuming[:] = [again] if again else []
    parent = os.getppid()  # the first rank, if Lightning started this process
    try:
        with ended_by_signals():
            yield
    except KeyboardInterrupt:
        _end("Stopped by Ctrl-C.", INTERRUPTED, parent)
    except Terminated as end:
        _end(
            f"Stopped by {signal.Signals(int(str(end)) - 128).name}.",
            int(str(end)),
            parent,
        )
    except SystemExit as end:
        if isinstance(
            end.__context__, KeyboardInterrupt
        ):  # how Lightning leaves on Ctrl-C
            _end("Stopped by Ctrl-C.", INTERRUPTED, parent)
        if type(end).__name__ == "SIGTERMException":  # Lightning's, which has no status
            _end("Stopped by SIGTERM.", TERMINATED, parent)
        raise
    except Exception as error:
        message = what_to_mend(error)
        if message is None or traceback:
            raise
        if not (isinstance(error, OSError) and error.errno in FULL):
            _resuming.clear()
        _end(f"error: {message}", MENDABLE, parent)


def what_to_mend(error: Exception) -> str | None:
    """Return what to tell the user about an error, or None if it is our own fault.

    The user can fix options and data that our code rejects, Trainer options that Lightning rejects, and files that
    cannot be read or written.
    """
    if (
        isinstance(error, UserError)
        or type(error).__name__ == "MisconfigurationException"
    ):
        return str(error)
    if isinstance(error, OSError) and (
        error.filename is not None or error.errno in FULL
    ):
        place = "" if error.filename is None else f" {error.filename}"
        return f"Cannot read or write{place}: {error.strerror}."
    return None


def _end(message: str, status: int, parent: int) -> NoReturn:
    if status != MENDABLE:
        threading.Thread(target=_exit_in_time, args=[status], daemon=True).start()
    if _rank() == 0:
        _stop_further_ranks()
        further = _resuming or (
            [] if status == MENDABLE else ["There is nothing to resume."]
        )
        print(visible(message), *further, sep="\n", file=sys.stderr)
    elif not _ends(parent) and status == MENDABLE:
        print(visible(f"On rank {_rank()}: {message}"), file=sys.stderr)
    sys.exit(status)


def _exit_in_time(status: int) -> None:
    """End the process if it is still running some time after its main thread has ended."""
    threading.main_thread().join()
    time.sleep(LONGEST_EXIT)
    os._exit(status)


def _rank() -> int:
    """Return this process's rank from the environment, since Lightning may not be imported yet."""
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def _ends(parent: int) -> bool:
    """Wait for the process that started this one to end, and tell whether it did."""
    until = time.monotonic() + PATIENCE
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(0.1)
    return os.getppid() != parent


def _stop_further_ranks() -> None:
    """Kill the processes that Lightning started: they would wait for the first rank, or add tracebacks."""
    for thread in threading.enumerate():
        for process in getattr(
            thread, "_child_processes", ()
        ):  # of Lightning's thread for them
            process.kill()
