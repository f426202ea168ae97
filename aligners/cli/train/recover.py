"""`train.py recover`: whether maps find a bijection that is known to exist."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from aligners.cli.options import add_training, command_parser
from aligners.cli.train.fit import fit_and_measure
from aligners.fitting.alignment import Alignment
from aligners.fitting.recovering.data import RandomTargets
from callbacks.checkpoint import SaveAligners

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
    fit_and_measure("recover", "recovery", parser, words)
