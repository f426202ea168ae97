"""`train.py validate`: the figures of a checkpoint's aligners on the validation texts."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from commands.run import start
from commands.train.fit import alignment_parser, alignment_trainer

__all__ = ["parser", "run"]


def parser() -> ArgumentParser:
    """The options: those of `fit`."""
    return alignment_parser("validate", "Show the figures of a checkpoint's aligners on the validation texts.")


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Show the figures."""
    options = parser.parse_args(words)
    begun = start("validate", parser, options)
    alignment_trainer(begun).validate(
        begun.made.model, datamodule=begun.made.data, ckpt_path=options.ckpt_path, weights_only=True, verbose=False
    )
