"""`train.py fit_pairs`: aligners of many pairs of models, in one bank."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
from jsonargparse import ArgumentParser

from aligners.fitting.alignment import Alignment
from aligners.fitting.parts import bytes_a_site, sites_at_once
from aligners.storage.earlier import ALIGNMENT
from callbacks.checkpoint import SavePairs
from commands.options import add_training, check_goes_on, check_trains, command_parser
from commands.run import instantiate, start
from commands.train.fit import alignment_trainer
from datamodules.many_pairs import ManyPairs
from storage.room import free_memory

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
    reader = data.reader
    each = bytes_a_site(model, reader.model_x.width, reader.model_y.width, data.batch_size * data.pipeline.max_length)
    most = sites_at_once(len(reader.sites), each, free_memory(trainer.strategy.root_device))
    if most < len(reader.sites):
        raise ValueError(
            f"Expected memory for {len(reader.sites)} places (pairs x sites), but {most} fit, at {each / 2**30:.1f} "
            "GiB each. Name fewer of `data.pairs` at a time, fewer `aligners`, or a smaller `data.batch_size`."
        )
