"""Starts runs at W&B, online or offline, and goes on with those that were interrupted."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from aligners.files.whole import write_text

__all__ = ["PROJECT", "complete", "logged_in", "new_number", "start_run", "unfinished"]

PROJECT = "aligners"
NUMBER = "wandb/unfinished.txt"  # in a run's folder, until the run is complete: its number at W&B


def unfinished(folder: Path) -> str | None:
    """The number of the W&B run of a folder whose command has not ended; None if it has, or there was none."""
    path = folder / NUMBER
    return path.read_text(encoding="utf-8").strip() or None if path.is_file() else None


def new_number(folder: Path, before: str | None = None) -> str:
    """Choose the number of a run, and keep it in the run's folder until the run is complete.

    It is kept before W&B starts, so that a process that is killed at any time goes on with the same run.

    Args:
        folder: of the run.
        before: number of the interrupted run that it goes on with. WANDB_RUN_ID, as an agent of a sweep sets it, has
            precedence.
    """
    number = os.environ.get("WANDB_RUN_ID") or before or secrets.token_hex(4)
    (folder / NUMBER).parent.mkdir(parents=True, exist_ok=True)
    write_text(folder / NUMBER, f"{number}\n")
    return number


def complete(folder: Path) -> None:
    """Note that the run of a folder is complete: what follows from its files is another run."""
    (folder / NUMBER).unlink(missing_ok=True)


def start_run(folder: Path, name: str, kind: str, group: str | None = None, number: str | None = None) -> Any:
    """Start a W&B run, or go on with one. It follows WANDB_MODE, but is online only for a user who is logged in.

    It never prompts.

    Args:
        folder: where its files are kept.
        name: of the run.
        kind: of job.
        group: of runs that belong together; default: WANDB_RUN_GROUP, or none.
        number: its id; a run of this id goes on. Default: WANDB_RUN_ID, or a new one.
    """
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    options: dict[str, Any] = {
        "dir": folder.resolve(),  # its service has a working directory of its own
        "project": os.environ.get("WANDB_PROJECT", PROJECT),
        "name": name,
        "job_type": kind,
        "group": group,
        "id": number,
        "resume": "allow",
        "settings": wandb.Settings(init_timeout=30),
    }
    # Lightning would pass an argument that W&B warns about.
    try:
        return _begin(options)
    except (wandb.errors.CommError, wandb.errors.AuthenticationError) as error:
        rank_zero_warn(f"W&B cannot be reached ({error}). This run is logged offline; `wandb sync` uploads it later.")
        return wandb.init(mode="offline", **options)


def _begin(options: dict[str, Any]) -> Any:
    """Start a run, as another one where that of this number is still open in W&B's service."""
    import wandb

    mode = _mode()
    try:
        return wandb.init(mode=mode, **options)
    except Exception as error:  # the service's own, which it does not export
        if "is in use" not in str(error):
            raise
        rank_zero_warn(f"At W&B the run `{options['id']}` cannot go on, as it has not ended. This is a new run.")
        return wandb.init(mode=mode, **{**options, "id": None})


def logged_in() -> bool:
    """Whether there is a key for W&B. It never prompts."""
    import wandb

    return bool(wandb.login(prompt=False))


def _mode() -> Any:
    """Return WANDB_MODE, or offline for a user who would be online and is not logged in."""
    mode = os.environ.get("WANDB_MODE")
    if mode not in (None, "", "online"):
        return mode
    if logged_in():
        return "online"
    if mode:
        rank_zero_warn(
            "WANDB_MODE is online, but W&B has no key: run `wandb login`, or set WANDB_API_KEY. This run is logged "
            "offline; `wandb sync` uploads it later."
        )
    return "offline"
