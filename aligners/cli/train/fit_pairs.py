"""`train.py fit_pairs`: aligners of many pairs of models, in one bank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import lightning.pytorch as pl
from jsonargparse import ArgumentParser

from aligners.cli.run import Run, instantiate, start
from aligners.cli.train.fit import check_maps, fit_and_show, fit_options, fit_parser, fit_trainer
from aligners.errors import UserError
from aligners.files.room import free_memory
from aligners.fitting.parts import bytes_a_site, pairs_within
from callbacks.progress import FitSummary
from datamodules.pairings import pairs_states
from datamodules.rows.policies import most_rows

parser = partial(
    fit_parser,
    "fit_pairs",
    "Fit aligners of many pairs of models at once: one bank of pairs x sites, every model read once a batch. Each pair "
    "gets a file pairs/X--Y/aligners.ckpt, as `fit` would write it.",
    pairs_states,
)


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Fit all pairs, and show what the best parameters reach."""
    options = fit_options("fit_pairs", parser, words)
    made = instantiate(parser, options)
    check_maps(made)
    begun = start("fit_pairs", parser, options, made)
    trainer = fit_trainer(begun, FitSummary(begun.folder))
    made.data.prepare_data()
    _check_memory(begun, trainer)
    fit_and_show(begun, trainer)


def _check_memory(run: Run, trainer: pl.Trainer) -> None:
    """Raise if the bank would not fit in memory."""
    data, reader, pairs = run.made.data, run.made.data.reader, len(run.made.data.numbers)
    rows = most_rows(data.rows, data.batch_size, data.max_length)
    d_x, d_y = reader.widths
    each = bytes_a_site(run.made.model, d_x, d_y, rows)
    free = free_memory(trainer.strategy.root_device)
    sites = len(reader.sites) // pairs
    most = pairs_within(free, sites, each, 0)  # the models are loaded
    if most < pairs:
        raise UserError(
            f"Expected memory for {pairs} pairs of models, but it holds {most}: a pair has {sites} sites, at "
            f"{each / 2**30:.1f} GiB each, and {free / 2**30:.1f} GiB are free. Name fewer of `data.pairs` at a time "
            "(`fit.pairs_at_once` of a study), fewer `aligners`, or a smaller `data.batch_size`."
        )
