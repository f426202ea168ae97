"""Measure what being a bijection costs between the states of two models.

Maps of equal size are trained for equal numbers of steps on the same rows, and measured on held-out text in both
directions, beside the least error that a map can have if it is to be good both ways.
"""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from aligners.cli.options import add_data_and_trainer, command_parser, options_of
from aligners.cli.run import instantiate, start
from aligners.fitting.pricing.evaluation import BijectionPrice
from aligners.reports.callback import WriteReport
from datamodules.paired import PairedActivations

__all__ = ["parser", "run"]


def parser() -> ArgumentParser:
    """The options."""
    made = command_parser("bijection", __doc__)
    made.add_class_arguments(BijectionPrice, None)
    add_data_and_trainer(made, PairedActivations, batch_size=64)
    made.set_defaults({"data.sites": "1"})
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Train, measure and report."""
    options = parser.parse_args(words)
    made = instantiate(parser, options)
    evaluation = BijectionPrice(**options_of(BijectionPrice, made))
    evaluation.check_widths(*made.data.pipeline.models.widths())
    begun = start("bijection", parser, options, made)
    trainer = begun.trainer(WriteReport("bijection", begun.folder), inference_mode=False)
    trainer.test(evaluation, datamodule=made.data, verbose=False)
