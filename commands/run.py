"""A run's folder, its loggers and the callbacks that every run gets."""

from __future__ import annotations

import logging
import os
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

__all__ = ["new_run_folder", "progress_bar", "quiet", "run_loggers", "start_evaluation"]

PROJECT = "aligners"
RANKS_SHARE = "ALIGNERS_RUN_FOLDER"


def _rank() -> int:
    return rank_zero_only.rank  # type: ignore[attr-defined]


def new_run_folder(wanted: Path | None, kind: str) -> Path:
    """A folder that no other run has.

    Processes that Lightning starts for further ranks inherit the choice of the first; ranks that somebody else
    starts follow rank 0 through the Trainer, which is the only one that writes.

    Args:
        wanted: what the user named; refused if it holds something. Default: `runs/<kind>-<date>-<time>`.
        kind: name of the command.

    Raises:
        ValueError: `wanted` exists and is not empty.
    """
    inherited = os.environ.get(RANKS_SHARE)
    if inherited and _rank() != 0:
        return Path(inherited)
    if _rank() == 0 and wanted is not None and wanted.exists() and any(wanted.iterdir()):
        raise ValueError(f"Expected `run` to be a new or empty folder, but {wanted} holds files. Name another.")
    base = wanted or Path("runs") / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, number = base, 1
    while _rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=wanted is not None)
            break
        except FileExistsError:
            number += 1
            folder = base.with_name(f"{base.name}-{number}")
    os.environ[RANKS_SHARE] = str(folder)
    return folder


def start_evaluation(
    kind: str, wanted: Path | None, settings: dict[str, Any], options: str
) -> tuple[Path, dict[str, Any]]:
    """Folder, loggers and Trainer settings of a command that makes its Trainers itself.

    Args:
        kind: name of the command, for the default folder.
        wanted: see `new_run_folder`.
        settings: of the Trainer, as the user gave them.
        options: of the whole run, as YAML, kept as config.yaml.

    Returns:
        The folder, and the settings with the loggers in them.
    """
    folder = new_run_folder(wanted, kind)
    settings = {**settings, "use_distributed_sampler": False}
    if settings["logger"] in (None, True):
        settings["logger"] = run_loggers(folder, kind)
    if _rank() == 0:
        (folder / "config.yaml").write_text(options)
    return folder, settings


def run_loggers(folder: Path, kind: str) -> list[Logger]:
    """CSV and W&B, both inside the run's folder.

    W&B follows WANDB_MODE where it is set. Otherwise it is online for a user who is logged in and offline for
    everybody else: it never asks. Only rank 0 makes a run.
    """
    csv = CSVLogger(folder.parent, name=folder.name, version="")
    _ = csv.experiment  # before W&B writes: it takes a folder with files in it for an older run's
    return [csv, _wandb(folder, kind)]


def _wandb(folder: Path, kind: str) -> WandbLogger:
    if _rank() != 0:
        return WandbLogger(save_dir=folder, mode="disabled")
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    options: dict[str, Any] = {
        "dir": folder,
        "project": os.environ.get("WANDB_PROJECT", PROJECT),
        "name": folder.name,
        "job_type": kind,
        "resume": "allow",
        "settings": wandb.Settings(init_timeout=30),
    }
    mode: Any = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
    # Not left to Lightning, which passes an argument that W&B warns about.
    try:
        run = wandb.init(mode=mode, **options)
    except (wandb.errors.CommError, wandb.errors.AuthenticationError) as error:
        rank_zero_warn(f"W&B cannot be reached ({error}). This run is logged offline; `wandb sync` sends it later.")
        run = wandb.init(mode="offline", **options)
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return WandbLogger(save_dir=folder, experiment=run)


def progress_bar(wanted: bool | None) -> list[Callback]:
    """Rich's, without the metrics: per-site curves are too many for one line. None where it is not wanted."""
    if wanted is False:
        return []

    class Bar(RichProgressBar):
        def get_metrics(self, trainer: object, pl_module: object) -> dict[str, int | str | float | dict[str, float]]:
            return {}

    return [Bar(leave=False)]


def quiet() -> None:
    """Keep off the screen what other packages say about themselves and nobody can act on here."""
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for message in (
        ".*does not have many workers.*",
        ".*is smaller than the logging interval.*",
        ".*LeafSpec.*",
        ".*sync_dist=True.*",  # the metrics are reduced over ranks before they are logged
        ".*will run with no optimizer.*",  # closed forms need none
        ".*args parameter is intended to run from within Python.*",  # the first word names the command
        ".*your dataloader is not resumable.*",  # it is: see TextStream.resumable
    ):
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
