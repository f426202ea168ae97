"""`train.py validate`: the figures of a checkpoint's aligners on the validation texts."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from aligners.cli.run import instantiate, start
from aligners.cli.train.fit import alignment_parser, alignment_trainer
from aligners.fitting.storage.bank import load_bank

__all__ = ["parser", "run"]


def parser() -> ArgumentParser:
    """The options: those of `fit`."""
    return alignment_parser("validate", "Show the figures of a checkpoint's aligners on the validation texts.")


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Show the figures."""
    options = parser.parse_args(words)
    made = instantiate(parser, options)
    if options.ckpt_path is None:
        raise ValueError("Expected `ckpt_path` to name the file aligners.ckpt of a fit, but got nothing.")
    stored = load_bank(options.ckpt_path)
    begun = start("validate", parser, options, made)
    begun.made.model.adopt(stored)
    alignment_trainer(begun).validate(begun.made.model, datamodule=begun.made.data, verbose=False)
