"""`train.py fit_attention`: aligners between the attention weights of two models."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from aligners.fitting.alignment import Alignment
from aligners.fitting.evaluation import ErrorsEvaluation
from aligners.storage.earlier import ALIGNMENT
from callbacks.checkpoint import SaveAligners
from commands.options import add_training, check_goes_on, check_trains, command_parser
from commands.run import start
from commands.train.fit import alignment_trainer
from datamodules.attention import PairedAttention

__all__ = ["parser", "run"]


def parser() -> ArgumentParser:
    """The options."""
    made = command_parser(
        "fit_attention",
        "Fit aligners between the attention weights of two models' blocks, the heads as dimensions, and measure their "
        "errors on held-out texts (Ren et al. 2023, Figures 4 and 5b).",
    )
    add_training(made, Alignment, PairedAttention, SaveAligners, num_sanity_val_steps=0)
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Fit, measure and report."""
    options = parser.parse_args(words)
    check_trains(options)
    check_goes_on(options.ckpt_path, "fit_attention", ALIGNMENT)
    begun = start("fit_attention", parser, options)
    model, data = begun.made.model, begun.made.data
    alignment_trainer(begun).fit(model, datamodule=data, ckpt_path=options.ckpt_path, weights_only=True)
    begun.test(ErrorsEvaluation(model), "attention")
