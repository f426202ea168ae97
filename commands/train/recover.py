"""`train.py recover`: whether maps find a bijection that is known to exist."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from aligners.fitting.alignment import Alignment
from aligners.fitting.evaluation import ErrorsEvaluation
from aligners.recovering.data import RandomTargets
from aligners.storage.earlier import ALIGNMENT
from callbacks.checkpoint import SaveAligners
from commands.options import add_training, check_goes_on, check_trains, command_parser
from commands.run import start
from commands.train.fit import alignment_trainer

__all__ = ["parser", "run"]


def parser() -> ArgumentParser:
    """The options."""
    made = command_parser(
        "recover",
        "Pair a model's states with random invertible networks of them, fit maps, and measure how well each finds the "
        "network (Ren et al. 2023, Table 3), by strength of the non-linearity and by site.",
    )
    add_training(made, Alignment, RandomTargets, SaveAligners, num_sanity_val_steps=0)
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Fit, measure and report."""
    options = parser.parse_args(words)
    check_trains(options)
    check_goes_on(options.ckpt_path, "recover", ALIGNMENT)
    begun = start("recover", parser, options)
    model, data = begun.made.model, begun.made.data
    alignment_trainer(begun).fit(model, datamodule=data, ckpt_path=options.ckpt_path, weights_only=True)
    begun.test(ErrorsEvaluation(model), "recovery")
