"""The folder of a run: one command has it, and it holds the options before anything else."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only

from storage.whole import write_text

__all__ = ["CONFIG", "RANKS_SHARE", "claim", "is_begun", "new_run_folder", "rank", "try_run_folder"]

CONFIG = "config.yaml"
RANKS_SHARE = "ALIGNERS_RUN_FOLDER"
_claimed: dict[Path, int] = {}  # the config.yaml of each run of this process, locked until the process ends


def rank() -> int:
    """The rank of this process."""
    return rank_zero_only.rank  # type: ignore[attr-defined]


def new_run_folder(wanted: Path | None, kind: str, *, begun: bool = False) -> Path:
    """Make a folder that no other run has.

    Processes that Lightning starts for further ranks inherit the choice of rank 0. Ranks that something else starts
    need no folder of their own: only rank 0 writes.

    Args:
        wanted: the folder that the user named, which must be empty. Default: `runs/<kind>-<date>-<time>`.
        kind: what the default folder is called after.
        begun: whether to go on with the run in `wanted`.

    Raises:
        ValueError: `wanted` is not empty, or the folder cannot be made.
    """
    inherited = os.environ.get(RANKS_SHARE)
    if inherited and rank() != 0:
        return Path(inherited)
    base = wanted or Path("runs") / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, number = base, 1
    with _said_plainly(base):
        if rank() == 0 and not begun and wanted is not None and wanted.exists() and any(wanted.iterdir()):
            raise ValueError(f"Expected `run` to be a new or empty folder, but {wanted} holds files. Name another.")
        while rank() == 0:
            try:
                folder.mkdir(parents=True, exist_ok=wanted is not None)
                break
            except FileExistsError:
                if wanted is not None:  # a file
                    raise
                number += 1
                folder = base.with_name(f"{base.name}-{number}")
    os.environ[RANKS_SHARE] = str(folder)
    return folder


def claim(folder: Path, options: str, *, begun: bool = False) -> None:
    """Take a folder for a run of this process: of several commands at once, one gets it.

    Args:
        folder: of the run.
        options: what config.yaml is to hold.
        begun: whether the run has a config.yaml already, which stays.

    Raises:
        ValueError: another command has the folder, or it cannot be written to.
    """
    config = folder / CONFIG
    with _said_plainly(folder):
        if not begun:
            try:
                config.touch(exist_ok=False)
            except FileExistsError as error:
                raise _taken(folder) from error
            try:
                write_text(config, options)
            except OSError:
                config.unlink()
                raise
        if folder.resolve() not in _claimed:
            _claimed[folder.resolve()] = _locked(config)


def is_begun(folder: Path | None) -> bool:
    """Whether a folder holds the options of a run."""
    return folder is not None and (folder / CONFIG).is_file()


def try_run_folder(wanted: Path | None) -> None:
    """Write a file where a run's folder is or will be, before any work is done for it.

    Raises:
        ValueError: that is not possible.
    """
    place = wanted or Path("runs")
    while not place.exists():
        place = place.parent
    with _said_plainly(wanted or place), tempfile.TemporaryFile(dir=place):
        pass


def _locked(config: Path) -> int:
    file = os.open(config, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _taken(config.parent) from error
    except OSError:  # a filesystem without locks
        pass
    return file


def _taken(folder: Path) -> ValueError:
    return ValueError(
        f"Expected `run` to be a folder of its own, but another command is at work in {folder}. Name another."
    )


@contextmanager
def _said_plainly(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"Expected `run` to be a folder that can be written to, but got {folder}: {error.strerror}. Name another."
        ) from error
