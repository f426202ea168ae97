"""The command line of `train.py`: Lightning's, with this project's defaults filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import WandbLogger

from aligners.alignment import Alignment
from callbacks.best import BestPerSite
from callbacks.checkpoint import SaveAligners, SaveStitching
from callbacks.run import new_run_folder, progress_bar, quiet, run_loggers
from callbacks.summary import FitSummary
from datamodules.paired import PairedActivations

__all__ = ["TRAINER_DEFAULTS", "AlignmentCLI", "RunCLI"]

TRAINER_DEFAULTS = {
    "max_epochs": -1,  # `model.rows` and `model.most_steps` say how long training takes
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 20,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class LogConfig(SaveConfigCallback):
    """Saves the resolved options beside the run's other files, and to W&B."""

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """On rank 0, after Lightning has written config.yaml."""
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                options = yaml.safe_load(self.parser.dump(self.config))
                logger.experiment.config.update(options, allow_val_change=True)


class RunCLI(LightningCLI):
    """A command that trains: it logs to CSV and W&B and keeps everything in one folder.

    Attributes:
        kind: name of the command, for the default folder.
        folder: of this run.
    """

    kind: str | None = None
    folder: Path

    def __init__(self, module: type[pl.LightningModule], data: type[pl.LightningDataModule], **options: Any) -> None:
        quiet()
        super().__init__(
            module,
            data,
            save_config_callback=LogConfig,
            save_config_kwargs={"overwrite": True},  # the folder is this run's own
            seed_everything_default=0,
            auto_configure_optimizers=False,
            **options,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run's folder."""
        parser.add_argument(
            "--run", type=Path | None, default=None,
            help="New folder of this run: config, logs, checkpoints, figures. "
            f"Default: runs/{self.kind or 'fit'}-<date>-<time>.",
        )  # fmt: skip

    def own_callbacks(self) -> list[pl.Callback]:
        """What this command adds to every run."""
        return []

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Give the run its folder, its loggers, its progress bar and its callbacks."""
        given, kind = self._get(self.config_init, "trainer"), self.kind or str(self.subcommand)
        self.folder = new_run_folder(self._get(self.config, "run"), kind)
        if given.get("logger") in (None, True):
            kwargs["logger"] = run_loggers(self.folder, kind)
        if given.get("default_root_dir") is None:
            kwargs["default_root_dir"] = str(self.folder)  # where files go that no logger has a place for
        callbacks = given.get("callbacks") or []
        callbacks = list(callbacks) if isinstance(callbacks, list) else [callbacks]
        kwargs["callbacks"] = [*callbacks, *progress_bar(given.get("enable_progress_bar")), *self.own_callbacks()]
        trainer = super().instantiate_trainer(**kwargs)
        for saving in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(saving, (SaveAligners, SaveStitching)):
                saving.folder = saving.folder or self.folder  # whatever loggers there are
        return trainer


class AlignmentCLI(RunCLI):
    """`fit` and `validate` over `Alignment` and `PairedActivations`.

    Unless the user names others, a run logs to CSV and W&B, keeps each site's best parameters, and saves its
    aligners; `early_stopping` and `checkpoint` hold the options of the latter two.
    """

    def __init__(self, args: Any = None) -> None:
        super().__init__(Alignment, PairedActivations, trainer_defaults=TRAINER_DEFAULTS, args=args)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """What can be asked of it."""
        return {"fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
                "validate": {"model", "dataloaders", "datamodule"}}  # fmt: skip

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run's folder and the two callbacks that have options."""
        super().add_arguments_to_parser(parser)
        parser.add_lightning_class_args(BestPerSite, "early_stopping")
        parser.add_lightning_class_args(SaveAligners, "checkpoint")

    def own_callbacks(self) -> list[pl.Callback]:
        """The summary."""
        return [FitSummary()]

    def fit(self, **kwargs: Any) -> None:
        """Fit. What a checkpoint to go on from holds is read as plain values and tensors only."""
        self.trainer.fit(**{**kwargs, "weights_only": True})

    def validate(self, **kwargs: Any) -> None:
        """Show the figures of a checkpoint's aligners."""
        self.trainer.validate(**{**kwargs, "weights_only": True, "verbose": False})

    def after_fit(self) -> None:
        """Show what the restored best parameters reach."""
        self.trainer.validate(self.model, datamodule=self.datamodule, verbose=False)
