"""Train stitching layers through frozen tails, then measure them on the held-out texts and report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jsonargparse import ArgumentParser

from aligners.cli.options import add_training, check_goes_on, check_trains, command_parser
from aligners.cli.run import start
from aligners.fitting.bank import STITCHING
from aligners.injection.stitching.measuring import StitchingEvaluation
from aligners.injection.stitching.training import Stitching
from aligners.reports.publishing import WriteReport
from callbacks.checkpoint import SaveStitching
from datamodules.model_texts import stitched_texts


def parser() -> ArgumentParser:
    """The options."""
    made = command_parser("stitch", __doc__)
    add_training(
        made,
        Stitching,
        stitched_texts,
        SaveStitching,
        max_steps=2000,
        val_check_interval=200,
        check_val_every_n_epoch=None,  # the interval counts steps, across epochs
        num_sanity_val_steps=-1,  # gives the first point of the learning curves
    )
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Train, measure and report."""
    options = parser.parse_args(words)
    check_trains(options)
    check_goes_on(options.ckpt_path, "stitch", STITCHING)
    begun = start("stitch", parser, options)
    model, data, saving = begun.made.model, begun.made.data, begun.made.checkpoint.inside(begun.folder)
    trainer = begun.trainer(begun.made.early_stopping, saving, WriteReport("stitching", begun.folder))
    trainer.fit(model, datamodule=data, ckpt_path=options.ckpt_path, weights_only=True)
    stored = replace(model.stored().freeze(), path=saving.folder / "stitching.ckpt")
    evaluation = StitchingEvaluation(stored, model.fitted, allow_mixed=model.allow_mixed, seed=model.seed)
    trainer.test(evaluation, datamodule=data, verbose=False)
