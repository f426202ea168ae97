"""`train.py fit_pairs`: aligners of many pairs of models, in one bank."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
from jsonargparse import ArgumentParser

from aligners.cli.options import add_training, check_goes_on, check_trains, command_parser
from aligners.cli.run import instantiate, start
from aligners.cli.train.fit import alignment_trainer
from aligners.files.room import free_memory
from aligners.fitting.alignment import Alignment
from aligners.fitting.parts import bytes_a_site, pairs_within
from aligners.fitting.storage.bank import ALIGNMENT
from callbacks.checkpoint import SavePairs
from datamodules.many_pairs import ManyPairs
from datamodules.rows.policies import most_rows

__all__ = ["parser", "run"]


def parser() -> ArgumentParser:
    """The options."""
    made = command_parser(
        "fit_pairs",
        "Fit aligners of many pairs of models at once: one bank of pairs x sites, every model read once a batch. Each "
        "pair gets a file pairs/X--Y/aligners.ckpt, as `fit` would write it.",
    )
    add_training(made, Alignment, ManyPairs, SavePairs, num_sanity_val_steps=0)
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Fit all pairs, and show what the best parameters reach."""
    options = parser.parse_args(words)
    check_trains(options)
    check_goes_on(options.ckpt_path, "fit_pairs", ALIGNMENT)
    made = instantiate(parser, options)
    widths = made.data.pipeline.models.widths()
    for a, b in made.data.numbers:
        for _ in made.model.made(1, widths[a], widths[b]):
            pass  # raises if a map cannot have these widths, before any model is made or loaded
    begun = start("fit_pairs", parser, options, made)
    trainer, model, data = alignment_trainer(begun), begun.made.model, begun.made.data
    data.prepare_data()
    _check_memory(model, data, trainer)
    trainer.fit(model, datamodule=data, ckpt_path=options.ckpt_path, weights_only=True)
    trainer.validate(model, datamodule=data, verbose=False)


def _check_memory(model: Alignment, data: ManyPairs, trainer: pl.Trainer) -> None:
    """Raise if the bank would not fit in memory."""
    reader, pairs = data.reader, len(data.numbers)
    rows = most_rows(data.rows, data.batch_size, data.pipeline.max_length)
    each = bytes_a_site(model, reader.model_x.width, reader.model_y.width, rows)
    free = free_memory(trainer.strategy.root_device)
    sites = len(reader.sites) // pairs
    most = pairs_within(free, sites, each, 0)  # the models are loaded
    if most < pairs:
        raise ValueError(
            f"Expected memory for {pairs} pairs of models, but it holds {most}: a pair has {sites} sites, at "
            f"{each / 2**30:.1f} GiB each, and {free / 2**30:.1f} GiB are free. Name fewer of `data.pairs` at a time "
            "(`fit.pairs_at_once` of a study), fewer `aligners`, or a smaller `data.batch_size`."
        )
