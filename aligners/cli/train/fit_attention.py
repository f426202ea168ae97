"""`train.py fit_attention`: aligners between the attention weights of two models."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from aligners.cli.options import add_training, command_parser
from aligners.cli.train.fit import fit_and_measure
from aligners.fitting.alignment import Alignment
from callbacks.checkpoint import SaveAligners
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
    fit_and_measure("fit_attention", "attention", parser, words)
