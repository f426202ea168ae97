"""Commands that begin runs at once, each in a process that imports no more than it needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aligners.cli.folders import claim, new_run_folder
from tests.processes import PROCESSES


def claims_at_once(wanted: Sequence[Path | None], count: int = 10) -> list[list[str]]:
    """What each of `count` processes says that begin the same runs at the same time, one run after the other."""
    ready, said = PROCESSES.Barrier(count), PROCESSES.Queue()
    each = [PROCESSES.Process(target=_claims, args=(wanted, ready, said)) for _ in range(count)]
    for process in each:
        process.start()
    found = [said.get() for _ in each]
    for process in each:
        process.join()
    return found


def _claims(wanted: Sequence[Path | None], ready: Any, said: Any) -> None:
    found = []
    for folder in wanted:
        made = new_run_folder(folder, "fit")
        ready.wait()  # everybody has found it empty
        try:
            claim(made, "some: options")
            found.append(f"has {made}")
        except ValueError as error:
            found.append(str(error))
    ready.wait()  # nobody has ended yet
    said.put(found)
