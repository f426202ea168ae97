"""A run's folder: it belongs to one command, and config.yaml is the first file in it."""

import os
import tempfile
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only

from aligners.cli.log import RUN_LOG, end_log, log_to
from aligners.errors import UserError
from aligners.files.atomic import (
    let_write,
    lock,
    refusing_folder,
    remove_unfinished,
    write_text,
)
from aligners.files.shared_folder import FILE_ENDINGS

CONFIG = "config.yaml"
OWNER = "run.txt"  # in a folder of checkpoints: the run that they belong to
OF_ANY = {"wandb", RUN_LOG}  # what a command leaves even if it fails at once
RANKS_SHARE = "ALIGNERS_RUN_FOLDER"
# Files of this process's runs that are open and locked: config.yaml and run.txt.
_claimed: dict[Path, int] = {}


def rank() -> int:
    """Return the rank of this process."""
    return rank_zero_only.rank  # type: ignore[attr-defined]


def new_run_folder(wanted: Path | None, kind: str, *, begun: bool = False) -> Path:
    """Make a folder for a new run.

    Ranks that Lightning starts inherit the choice of rank 0. Ranks that are started in any other way need no folder:
    only rank 0 writes.

    Args:
        wanted: the folder that the user named; it must be new or empty, W&B's files and a log aside. Default:
            `runs/<kind>-<date>-<time>`.
        kind: first part of the default name.
        begun: whether to resume the run in `wanted`.

    Raises:
        ValueError: `wanted` is not empty, or the folder cannot be made.
    """
    inherited = os.environ.get(RANKS_SHARE)
    if inherited and rank() != 0:
        return Path(inherited)
    base = wanted or Path("runs") / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, number = base, 1
    with refusing_folder(base, "run"):
        if rank() == 0 and not begun and wanted is not None and not is_free(wanted):
            raise UserError(
                f"Expected `run` to be a new or empty folder, but {wanted} holds files. Name another."
            )
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
    """Claim a folder for a run of this process, and begin its log. If several commands try at once, one succeeds.

    Args:
        folder: the run's folder, which exists.
        options: the content of config.yaml.
        begun: whether the run is resumed; its config.yaml then stays as it is.

    Raises:
        ValueError: another command has claimed the folder, or it cannot be written to.
    """
    config = folder / CONFIG
    let_write(folder)
    with refusing_folder(folder, "run"):
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
        if config.resolve() not in _claimed:
            _claimed[config.resolve()] = _locked(config)
        log_to(folder / RUN_LOG)


def claim_checkpoints(folder: Path, run: Path, resumed: Path | None = None) -> None:
    """Claim a folder for the checkpoints of a run that are not kept in the run's own folder.

    Args:
        folder: folder for the checkpoints; it is made if missing.
        run: the run's folder.
        resumed: the checkpoint that the run goes on from.

    Raises:
        ValueError: the checkpoints of another run are there, another command is at work there, or it cannot be
            written to.
    """
    let_write(folder)
    with refusing_folder(folder, "checkpoint.folder"):
        folder.mkdir(parents=True, exist_ok=True)
        owner = folder / OWNER
        file = _locked(owner, "checkpoint.folder")
        there = sorted(
            path.name for path in folder.iterdir() if path.suffix in FILE_ENDINGS
        )
        if there and (resumed is None or resumed.resolve().parent != folder.resolve()):
            os.close(file)
            raise UserError(
                f"Expected `checkpoint.folder` to hold no checkpoints of another run, but {folder} holds "
                f"{', '.join(there)}. Name another folder, or go on from its last.ckpt with `ckpt_path`."
            )
        os.truncate(file, 0)  # the file is locked: nothing may take its place
        os.pwrite(file, f"{run.resolve()}\n".encode(), 0)
        _claimed[owner.resolve()] = file


def interrupted_run(checkpoint: str | None) -> Path | None:
    """Return the folder of the run that a last.ckpt, or a folder of parts, belongs to; None for any other file.

    Args:
        checkpoint: what a run goes on from; None if it begins anew.
    """
    path = Path(checkpoint or "")
    if checkpoint is None or not (path.name == "last.ckpt" or path.is_dir()):
        return None
    folder = path if path.is_dir() else path.parent
    owner = folder / OWNER
    return (
        Path(owner.read_text(encoding="utf-8").strip()) if owner.is_file() else folder
    )


def goes_on_from(folder: Path, checkpoints: Path | None = None) -> Path | None:
    """Return what an interrupted run can resume from: its last.ckpt, or its folder if it is in parts; None: nothing.

    Args:
        folder: folder of the run.
        checkpoints: their folder. Default: that of the run.
    """
    last = (checkpoints or folder) / "last.ckpt"
    if last.is_file():
        return last
    return folder if any(folder.glob("part-*")) else None


def release(folder: Path) -> None:
    """Release what this process has claimed in a folder: its runs are over."""
    for file in [file for file in _claimed if folder.resolve() in file.parents]:
        os.close(_claimed.pop(file))
        end_log(RUN_LOG)


def release_unused() -> None:
    """Release this process's folders in which nothing was written yet, so that `--run` can name them again."""
    for path, file in list(_claimed.items()):
        if _holds(path.parent) <= {path.name, *OF_ANY}:
            path.unlink(missing_ok=True)
            os.close(file)
            del _claimed[path]


def tidy(folder: Path) -> None:
    """Remove the half-written files that a killed command has left in its run's folder.

    Nothing is removed from any other folder, nor where the command is still at work.
    """
    if not is_begun(folder):
        return
    with suppress(
        OSError, ValueError
    ):  # it cannot be written to, or another command has it
        lock = _locked(folder / CONFIG)
        try:
            remove_unfinished(folder)
        finally:
            os.close(lock)


def is_begun(folder: Path | None) -> bool:
    """Tell whether a folder holds the options of a run."""
    return folder is not None and (folder / CONFIG).is_file()


def is_free(folder: Path) -> bool:
    """Tell whether a folder can become that of a run: it is new, or empty, W&B's files and a log aside."""
    return not folder.exists() or not _holds(folder) - OF_ANY


def try_run_folder(wanted: Path | None) -> None:
    """Check that a run's folder can be written to, or made, before any work is done.

    Raises:
        ValueError: it cannot be written to, or made.
    """
    place = wanted or Path("runs")
    while not place.exists():
        place = place.parent
    with refusing_folder(wanted or place, "run"), tempfile.TemporaryFile(dir=place):
        pass


def _holds(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _locked(path: Path, argument: str = "run") -> int:
    file = lock(path)
    if file is None:
        raise _taken(path.parent, argument)
    return file


def _taken(folder: Path, argument: str = "run") -> ValueError:
    return UserError(
        f"Expected `{argument}` to be a folder of its own, but another command is at work in {folder}. Wait for it, "
        "or name another folder."
    )
