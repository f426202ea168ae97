"""What every run has: a folder, loggers and a Trainer."""

from __future__ import annotations

import logging
import os
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from aligners.cli.folders import claim, claim_checkpoints, interrupted_run, new_run_folder, rank, tidy
from aligners.cli.lineage import note_begun
from aligners.errors import UserError, check_range
from aligners.reports.publishing import WriteReport
from aligners.reports.tracking import new_number, start_run, unfinished
from callbacks.progress import ProgressBar

LARGEST_SEED = 2**32 - 1  # NumPy's


class Run(NamedTuple):
    """A run that has begun.

    Attributes:
        folder: where everything is written.
        options: the command's options as plain values.
        made: the same options, instantiated.
        settings: arguments for the Trainer, with loggers and the user's callbacks.
    """

    folder: Path
    options: Namespace
    made: Namespace
    settings: dict[str, Any]

    def trainer(self, *callbacks: pl.Callback, **changes: Any) -> pl.Trainer:
        """Make a Trainer for this run.

        Args:
            callbacks: added to the progress bar and to copies of the user's callbacks.
            changes: settings that differ.

        Raises:
            ValueError: an option is of the wrong type.
        """
        given = self.settings["callbacks"] or []
        given = deepcopy(given if isinstance(given, list) else [given])
        bar = [] if self.settings["enable_progress_bar"] is False else [ProgressBar()]
        try:
            return pl.Trainer(**{**self.settings, **changes, "callbacks": [*given, *bar, *callbacks]})
        except TypeError as error:  # Lightning's words for `devices` of another type
            raise UserError(f"Lightning's Trainer does not take these options: {error}") from error

    def test(self, evaluation: pl.LightningModule, kind: str, *callbacks: pl.Callback, **options: Any) -> None:
        """Test a LightningModule on this run's data, and report.

        Args:
            evaluation: the LightningModule.
            kind: the kind of report.
            callbacks: added to those of every run.
            options: arguments of the report.
        """
        trainer = self.trainer(WriteReport(kind, self.folder, **options), *callbacks)
        trainer.test(evaluation, datamodule=self.made.data, verbose=False)


def start(
    kind: str, parser: ArgumentParser, options: Namespace, made: Namespace | None = None, *, begun: bool = False
) -> Run:
    """Begin a run: seed it, claim its folder with config.yaml, then start its loggers.

    Args:
        kind: first part of the default folder's name.
        parser: the command's parser.
        options: the command's options as plain values.
        made: the same options, if they have been instantiated already.
        begun: whether to resume the run in the folder `options.run`.

    Raises:
        ValueError: another command has claimed the folder, or it cannot be written to.
    """
    made = instantiate(parser, options) if made is None else made
    folder, written = new_run_folder(options.run, kind, begun=begun), parser.dump(options)
    before = folder if begun else interrupted_run(options.get("ckpt_path"))
    number = None if before is None else unfinished(before)
    if rank() == 0:
        claim(folder, written, begun=begun)  # before W&B starts, which can take half a minute
        if options.get("ckpt_path"):  # the run to go on with may have been killed as it wrote
            before = Path(options.ckpt_path)
            tidy(before if before.is_dir() else before.parent)
        saving = options.get("checkpoint")
        if isinstance(saving, Namespace) and saving.folder is not None:
            claim_checkpoints(saving.folder, folder, options.get("ckpt_path") and Path(options.ckpt_path))
    settings = {**vars(made.trainer), "use_distributed_sampler": False}  # data modules divide each batch among ranks
    if settings["logger"] in (None, True):
        # A resumed run logs to another folder: a logger deletes the files that it finds in its own.
        again = f"resumed-{len(list(folder.glob('resumed-*'))) + 1}"
        number = new_number(folder, number) if rank() == 0 else None
        settings["logger"] = run_loggers(folder / again if begun else folder, kind, number)
    if settings["default_root_dir"] is None:
        settings["default_root_dir"] = str(folder)  # for files that no logger has a place for
    for logger in settings["logger"] if isinstance(settings["logger"], list) else [settings["logger"]]:
        if isinstance(logger, WandbLogger) and rank() == 0:
            logger.experiment.config.update(yaml.safe_load(written), allow_val_change=True)
            note_begun(logger.experiment, folder, options, made)
    return Run(folder, options, made, settings)


def instantiate(parser: ArgumentParser, options: Namespace) -> Namespace:
    """Set the seed, then make the objects that the options describe. A drawn seed is written into the options."""
    seed = options.get("seed_everything", False)
    if seed is not False:
        check_range(least=0, most=LARGEST_SEED, seed_everything=seed)
        options.seed_everything = pl.seed_everything(None if seed is True else seed, workers=True)
    return parser.instantiate(options)


def run_loggers(folder: Path, kind: str, number: str | None = None) -> list[Logger]:
    """Make the loggers, CSV and W&B, both inside the run's folder.

    W&B follows WANDB_MODE, but is online only for a user who is logged in; it never prompts. Only rank 0 starts a run.

    Args:
        folder: of the run.
        kind: of job.
        number: of the run at W&B; default: a new one.
    """
    csv = CSVLogger(folder.parent, name=folder.name, version="")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*exists and is not empty.*")  # config.yaml is there
        _ = csv.experiment  # before W&B writes: this deletes what it finds of an older run
    return [csv, _wandb(folder, kind, number)]


def _wandb(folder: Path, kind: str, number: str | None = None) -> WandbLogger:
    if rank() != 0:
        return WandbLogger(save_dir=folder, mode="disabled")
    run = start_run(folder, folder.name, kind, number=number)
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return WandbLogger(save_dir=folder, experiment=run)


def quiet() -> None:
    """Silence messages of other packages that nobody here can act on."""
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
