"""`train.py validate`: the figures of a checkpoint's aligners on the validation texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from jsonargparse import ArgumentParser

from aligners.cli.run import instantiate, start
from aligners.cli.train import fit
from aligners.errors import UserError
from aligners.fitting.bank import load_bank
from callbacks.progress import FitSummary

parser = partial(fit.parser, "validate", "Show the figures of a checkpoint's aligners on the validation texts.")


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Show the figures."""
    options = parser.parse_args(words)
    made = instantiate(parser, options)
    if options.ckpt_path is None:
        raise UserError("Expected `ckpt_path` to name the file aligners.ckpt of a fit, but got nothing.")
    stored = load_bank(options.ckpt_path)
    begun = start("validate", parser, options, made)
    made.model.adopt(stored)
    trainer = fit.fit_trainer(begun, FitSummary(begun.folder))
    trainer.validate(made.model, datamodule=made.data, verbose=False)
