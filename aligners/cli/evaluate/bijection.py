"""Measure what being a bijection costs between the states of two models.

Maps of equal size are trained for equal numbers of steps on the same rows, and measured on held-out text in both
directions, beside the least error that a map can have if it is to be good both ways.
"""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from aligners.cli.options import add_data_and_trainer, command_parser, options_of
from aligners.cli.run import instantiate, start
from aligners.fitting.price import BijectionPrice
from aligners.reports.publishing import write_report
from datamodules.pairings import pair_states


def parser() -> ArgumentParser:
    """The options."""
    made = command_parser("bijection", __doc__)
    made.add_class_arguments(BijectionPrice, None)
    add_data_and_trainer(made, pair_states, batch_size=64)
    made.set_defaults({"data.sites": "1"})
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Train, measure and report."""
    options = parser.parse_args(words)
    made = instantiate(parser, options)
    price = BijectionPrice(**options_of(BijectionPrice, made))
    price.check_widths(*made.data.frozen_models.widths())
    begun = start("bijection", parser, options, made)
    trainer = begun.trainer(inference_mode=False)
    trainer.test(price, datamodule=made.data, verbose=False)
    price.run()
    write_report(price, "bijection", begun.folder, trainer)
