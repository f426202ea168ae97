"""`train.py stitch` and `evaluate.py stitch`: layers trained through frozen tails, and what stitched models can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from aligners.stitching.evaluation import StitchingEvaluation
from aligners.stitching.storage import StoredStitching, load_stitching
from aligners.stitching.training import Stitching
from callbacks.best import BestPerSite
from callbacks.checkpoint import SaveStitching
from commands.fit import TRAINER_DEFAULTS, RunCLI
from commands.run import progress_bar, start_evaluation
from datamodules.model_texts import ModelTexts
from reports.stitching.report import StitchingReport

__all__ = ["StitchingCLI", "evaluate_stitching", "stitching_parser"]

STEPS = {
    "max_epochs": -1,  # as many passes over the texts as the steps need
    "max_steps": 2000,
    "val_check_interval": 200,
    "check_val_every_n_epoch": None,  # the interval counts steps, across passes
    "num_sanity_val_steps": -1,  # the first point of the learning curves
}


class StitchingCLI(RunCLI):
    """Trains stitching layers, then measures them on the held-out texts and reports."""

    def __init__(self, args: Any = None) -> None:
        super().__init__(
            Stitching,
            ModelTexts,
            trainer_defaults=TRAINER_DEFAULTS | STEPS,
            run=False,
            parser_kwargs={"prog": "train.py stitch", "description": self.__doc__},
            args=args,
        )
        ckpt_path = self.config_init.ckpt_path
        self.trainer.fit(self.model, datamodule=self.datamodule, ckpt_path=ckpt_path, weights_only=True)
        evaluation = StitchingEvaluation(
            load_stitching((self.config_init.checkpoint.folder or self.folder) / "stitching.ckpt"),
            self.model.fitted,
            allow_mixed=self.model.allow_mixed,
            seed=self.model.seed,
        )
        self.trainer.test(evaluation, datamodule=self.datamodule, verbose=False)

    kind = "stitch"

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run's folder, what is kept of a run, and the checkpoint to go on from."""
        super().add_arguments_to_parser(parser)
        parser.add_lightning_class_args(BestPerSite, "early_stopping")
        parser.add_lightning_class_args(SaveStitching, "checkpoint")  # after the best is put back
        parser.add_argument(
            "--ckpt_path", type=Path | None, default=None, help="File last.ckpt of an interrupted run, to go on from."
        )

    def own_callbacks(self) -> list[pl.Callback]:
        """The report."""
        return [StitchingReport(self.folder)]


def stitching_parser() -> ArgumentParser:
    """The options of `evaluate.py stitch`."""
    parser = ArgumentParser(
        description="Stitch models on held-out text and measure the penalty. With a checkpoint of `train.py stitch`: "
        "its layers. Without: identity stitching between any number of models of one width, at every block or on the "
        "whole grid of site pairs."
    )
    parser.add_argument("--config", action="config", help="YAML file with any of these options.")
    parser.add_argument(
        "--checkpoint", type=Path | None, default=None,
        help="File stitching.ckpt. Its data options are this command's defaults.",
    )  # fmt: skip
    parser.add_argument(
        "--run", type=Path | None, default=None,
        help="New folder of the report. Default: runs/stitching-<date>-<time>.",
    )  # fmt: skip
    parser.add_argument(
        "--groups", type=dict[str, list[str]] | None, default=None,
        help="Name -> models, for example those that generalise and those that do not: means are then taken over the "
        "routes within and between groups.",
    )  # fmt: skip
    parser.add_class_arguments(StitchingEvaluation, None, skip={"stored"})
    parser.add_class_arguments(ModelTexts, "data")
    parser.add_class_arguments(pl.Trainer, "trainer", skip={"callbacks"}, instantiate=False)
    parser.set_defaults({"data.batch_size": 128, "trainer.enable_checkpointing": False})
    return parser


def evaluate_stitching(options: Namespace, made: Namespace, stored: StoredStitching | None) -> None:
    """Run the evaluation through the Trainer.

    Args:
        options: what was asked for, as plain values.
        made: the same, with the data module instantiated.
        stored: the checkpoint.
    """
    given = stitching_parser().dump(options)
    evaluation = StitchingEvaluation(
        stored, options.fitted, options.routes, options.identity, options.allow_mixed, options.seed
    )
    folder, settings = start_evaluation("stitching", options.run, vars(options.trainer), given)
    callbacks = [*progress_bar(settings["enable_progress_bar"]), StitchingReport(folder, options.groups)]
    trainer = pl.Trainer(**settings, callbacks=callbacks)
    trainer.test(evaluation, datamodule=made.data, verbose=False)
