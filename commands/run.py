"""What every run of a command has: a folder, loggers, and a Trainer."""

from __future__ import annotations

import logging
import os
import warnings
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from callbacks.progress import ProgressBar
from reports.callback import WriteReport

__all__ = ["RANKS_SHARE", "Run", "instantiate", "new_run_folder", "quiet", "run_loggers", "start"]

PROJECT = "aligners"
RANKS_SHARE = "ALIGNERS_RUN_FOLDER"


def _rank() -> int:
    return rank_zero_only.rank  # type: ignore[attr-defined]


class Run(NamedTuple):
    """A run that has begun.

    Attributes:
        folder: where everything goes.
        options: of the command, as plain values.
        made: the same options, instantiated.
        settings: of the Trainer, with loggers and the user's callbacks.
    """

    folder: Path
    options: Namespace
    made: Namespace
    settings: dict[str, Any]

    def trainer(self, *callbacks: pl.Callback, **changes: Any) -> pl.Trainer:
        """A Trainer of this run.

        Args:
            callbacks: beside the progress bar and copies of the user's.
            changes: of the settings.
        """
        given = self.settings["callbacks"] or []
        given = deepcopy(given if isinstance(given, list) else [given])
        bar = [] if self.settings["enable_progress_bar"] is False else [ProgressBar()]
        return pl.Trainer(**{**self.settings, **changes, "callbacks": [*given, *bar, *callbacks]})

    def test(self, evaluation: pl.LightningModule, kind: str, **options: Any) -> None:
        """Test a LightningModule on the data of this run, and report.

        Args:
            evaluation: what measures.
            kind: of the report.
            options: of the report.
        """
        trainer = self.trainer(WriteReport(kind, self.folder, **options))
        trainer.test(evaluation, datamodule=self.made.data, verbose=False)


def new_run_folder(wanted: Path | None, kind: str, *, begun: bool = False) -> Path:
    """Make a folder that no other run has.

    Processes that Lightning starts for further ranks inherit the choice of rank 0. Ranks that something else starts
    need no folder of their own: only rank 0 writes.

    Args:
        wanted: the folder that the user named, which must be empty. Default: `runs/<kind>-<date>-<time>`.
        kind: what the default folder is called after.
        begun: whether to go on with the run in `wanted`.

    Raises:
        ValueError: `wanted` exists and is not empty.
    """
    inherited = os.environ.get(RANKS_SHARE)
    if inherited and _rank() != 0:
        return Path(inherited)
    if _rank() == 0 and not begun and wanted is not None and wanted.exists() and any(wanted.iterdir()):
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


def start(
    kind: str, parser: ArgumentParser, options: Namespace, made: Namespace | None = None, *, begun: bool = False
) -> Run:
    """Begin a run: seed it, make its folder with config.yaml and its loggers.

    Args:
        kind: what the default folder is called after.
        parser: of the command.
        options: of the command, as plain values.
        made: the same options instantiated, if they have been already.
        begun: whether to go on with the run in the folder `options.run`.
    """
    made = instantiate(parser, options) if made is None else made
    folder = new_run_folder(options.run, kind, begun=begun)
    settings = {**vars(made.trainer), "use_distributed_sampler": False}  # the data modules share out each batch
    if settings["logger"] in (None, True):
        # A run that goes on logs to a folder of its own: a logger deletes the files that it finds in its folder.
        again = f"resumed-{len(list(folder.glob('resumed-*'))) + 1}"
        settings["logger"] = run_loggers(folder / again if begun else folder, kind)
    if settings["default_root_dir"] is None:
        settings["default_root_dir"] = str(folder)  # where files go that no logger has a place for
    if _rank() == 0:
        _keep_options(parser.dump(options), folder, settings["logger"], begun)
    return Run(folder, options, made, settings)


def instantiate(parser: ArgumentParser, options: Namespace) -> Namespace:
    """Seed, then make the objects that the options describe. A seed that is drawn is written into the options."""
    seed = options.get("seed_everything", False)
    if seed is not False:
        options.seed_everything = pl.seed_everything(None if seed is True else seed, workers=True)
    return parser.instantiate(options)


def _keep_options(written: str, folder: Path, loggers: Any, begun: bool) -> None:
    """Write the options to config.yaml, unless the run has one, and to W&B."""
    if not begun:
        (folder / "config.yaml").write_text(written)
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        if isinstance(logger, WandbLogger):
            logger.experiment.config.update(yaml.safe_load(written), allow_val_change=True)


def run_loggers(folder: Path, kind: str) -> list[Logger]:
    """CSV and W&B, both inside the run's folder.

    W&B follows WANDB_MODE if it is set. Otherwise it is online for a user who is logged in and offline for everybody
    else: it never asks. Only rank 0 makes a run.
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


def quiet() -> None:
    """Silence messages of other packages that nobody can act on here."""
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for message in (
        ".*does not have many workers.*",
        ".*is smaller than the logging interval.*",
        ".*LeafSpec.*",
        ".*sync_dist=True.*",  # the metrics are reduced over ranks before they are logged
        ".*will run with no optimizer.*",  # closed forms need none
        ".*your dataloader is not resumable.*",  # it is: see TextModule.resumable
    ):
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
