"""Starts runs at W&B, online or offline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

__all__ = ["start_run"]

PROJECT = "aligners"


def start_run(folder: Path, name: str, kind: str, group: str | None = None) -> Any:
    """Start a W&B run. It follows WANDB_MODE, but is online only for a user who is logged in; it never prompts.

    Args:
        folder: where its files are kept.
        name: of the run.
        kind: of job.
        group: of runs that belong together; default: WANDB_RUN_GROUP, or none.
    """
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    options: dict[str, Any] = {
        "dir": folder,
        "project": os.environ.get("WANDB_PROJECT", PROJECT),
        "name": name,
        "job_type": kind,
        "group": group,
        "resume": "allow",
        "settings": wandb.Settings(init_timeout=30),
    }
    # Lightning would pass an argument that W&B warns about.
    try:
        return wandb.init(mode=_mode(), **options)
    except (wandb.errors.CommError, wandb.errors.AuthenticationError) as error:
        rank_zero_warn(f"W&B cannot be reached ({error}). This run is logged offline; `wandb sync` uploads it later.")
        return wandb.init(mode="offline", **options)


def _mode() -> Any:
    """Return WANDB_MODE, or offline for a user who would be online and is not logged in."""
    import wandb

    mode = os.environ.get("WANDB_MODE")
    if mode not in (None, "", "online"):
        return mode
    if wandb.login(prompt=False):
        return "online"
    if mode:
        rank_zero_warn(
            "WANDB_MODE is online, but W&B has no key: run `wandb login`, or set WANDB_API_KEY. This run is logged "
            "offline; `wandb sync` uploads it later."
        )
    return "offline"
