"""The command line of `train.py`: Lightning's, with this project's defaults filled in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import WandbLogger

from aligners.fitting.alignment import Alignment
from callbacks.best import BestPerSite
from callbacks.checkpoint import SaveAligners, SaveStitching
from callbacks.summary import FitSummary
from commands.parts import bytes_a_site, find_part, free_memory, join_parts, sites_at_once
from commands.run import new_run_folder, progress_bar, quiet, run_loggers
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

    joined: Path | None = None

    def __init__(self, args: Any = None) -> None:
        self._given = list(sys.argv[1:] if args is None else args)
        super().__init__(Alignment, PairedActivations, trainer_defaults=TRAINER_DEFAULTS, args=args)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """What can be asked of it."""
        return {"fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
                "validate": {"model", "dataloaders", "datamodule"}}  # fmt: skip

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run's folder and the two callbacks that have options."""
        super().add_arguments_to_parser(parser)
        parser.add_argument(
            "--sites_at_once", type=int | None, default=None,
            help="Train a bank so many sites at a time, in runs part-1-1, part-2-1, ... of this run's folder. Default: "
            "all sites, or as many as fit in memory. `--ckpt_path FOLDER` goes on with the parts of a run.",
        )  # fmt: skip
        parser.add_lightning_class_args(BestPerSite, "early_stopping")
        parser.add_lightning_class_args(SaveAligners, "checkpoint")

    def own_callbacks(self) -> list[pl.Callback]:
        """The summary."""
        return [FitSummary()]

    def fit(self, **kwargs: Any) -> None:
        """Fit, in parts if need be. What a checkpoint to go on from holds is read as plain values and tensors only."""
        at_once = self._sites_at_once()
        if at_once is None:
            self.trainer.fit(**{**kwargs, "weights_only": True})
        else:
            self.joined = self._fit_in_parts(at_once, kwargs.get("ckpt_path"))

    def _sites_at_once(self) -> int | None:
        """How many sites are trained together; None: all."""
        wanted = self._get(self.config, "sites_at_once")
        if self.trainer.world_size > 1:
            if wanted is not None:
                raise ValueError(
                    f"`sites_at_once` is for one process, but `trainer.devices` makes {self.trainer.world_size}. Fit "
                    "some sites at a time with `data.sites`."
                )
            return None
        if wanted is not None and wanted < 1:
            raise ValueError(f"Expected `sites_at_once` to be at least 1, but got {wanted}.")
        self.datamodule.prepare_data()
        reader = self.datamodule.reader
        sites, models = len(reader.sites), (reader.model_x, reader.model_y)
        rows = self.datamodule.batch_size * self.datamodule.max_length
        each = bytes_a_site(self.model, reader.model_x.width, reader.model_y.width, rows)
        weights = [weight for model in models for weight in model.model.parameters()]
        free = free_memory(self.trainer.strategy.root_device) - sum(w.numel() * w.element_size() for w in weights)
        at_once = min(sites, wanted or sites_at_once(sites, each, free))
        return at_once if at_once < sites else None

    def _fit_in_parts(self, at_once: int, ckpt_path: str | None) -> Path:
        """Each part as a run of its own, but those that an interrupted run has finished; then all as one."""
        sites = [f"{i}:{j}" for i, j in self.datamodule.reader.sites]
        parts = [",".join(sites[first : first + at_once]) for first in range(0, len(sites), at_once)]
        folder = Path(ckpt_path) if ckpt_path else self.folder
        print(
            f"{len(sites)} site pairs are trained {at_once} at a time, in {len(parts)} parts, in {folder}.", flush=True
        )
        files = []
        for number, part in enumerate(parts, start=1):
            run, done, last = find_part(folder, number)
            if done is None:
                print(f"\nPart {number} of {len(parts)}: {part}", flush=True)
                options = ["--data.sites", part, "--run", str(run), "--sites_at_once", str(at_once)]
                options += ["--ckpt_path", "null" if last is None else str(last), "--trainer.logger", "false"]
                AlignmentCLI([*self._given, *options])
                done = run / "aligners.ckpt"
                if not done.is_file():
                    raise ValueError(
                        f"Expected part {number} to leave {done}, but it has not: there was nothing left to train. "
                        f"Remove {run.parent / f'part-{number}-*'} and go on with `--ckpt_path {folder}`."
                    )
            files.append(done)
        return join_parts(files, self.folder)

    def validate(self, **kwargs: Any) -> None:
        """Show the figures of a checkpoint's aligners."""
        self.trainer.validate(**{**kwargs, "weights_only": True, "verbose": False})

    def after_fit(self) -> None:
        """Show what the restored best parameters reach."""
        options: Any = {"ckpt_path": self.joined, "weights_only": True} if self.joined else {}
        self.trainer.validate(self.model, datamodule=self.datamodule, verbose=False, **options)
