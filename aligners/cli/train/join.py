"""`train.py join`: one more model in a universe, by one fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from aligners.cli.options import add_training, check_goes_on, check_trains, command_parser, parse_with_data
from aligners.cli.run import instantiate, start
from aligners.cli.train.universe import check_against
from aligners.fitting.storage.bank import ALIGNMENT, StoredBank, load_bank
from aligners.fitting.universe.evaluation import UniverseEvaluation
from aligners.fitting.universe.joining import Joining
from aligners.fitting.universe.storage import load_universe, universes_of
from aligners.fitting.universe.universe import NETWORK
from callbacks.checkpoint import SaveNewcomer, SaveUniverse, save_universe
from datamodules.universe import NewcomerStates, check_widths

__all__ = ["parser", "run"]


def parser() -> ArgumentParser:
    """The options."""
    made = command_parser(
        "join",
        "Fit one more model, `--data.models '[NEW]'`, to the shared space of a universe that stays as it is: one fit "
        "for the maps from and to all its members, whose states on the same texts are read.",
    )
    made.add_argument("--universe", type=Path | None, default=None, help="The file universe.ckpt to join.")
    made.add_argument(
        "--against", type=list[Path], default=[], help="As in `train.py universe`: maps of pairs to measure beside."
    )
    add_training(made, Joining, NewcomerStates, SaveNewcomer, num_sanity_val_steps=0)
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Fit, measure, write the universe of all, and report."""
    options = parser.parse_args(words)
    check_trains(options)
    check_goes_on(options.ckpt_path, "join", ALIGNMENT)
    if options.universe is None:
        raise ValueError("Expected `universe` to name a file universe.ckpt, but got nothing.")
    stored, against = load_universe(options.universe), [load_bank(path) for path in options.against]
    options = _with_members(parse_with_data(parser, words, {**stored.data_config, "models": []}), stored)
    made = instantiate(parser, options)
    model, data = made.model, made.data
    check_widths(list(zip(data.models, data.pipeline.models.widths(), strict=True)))
    check_against(against, data)
    begun = start("join", parser, options, made)
    data.prepare_data()
    model.refuse_other_members(stored, data)
    model.join(universes_of(stored)[NETWORK], data)
    trainer = begun.trainer(made.early_stopping, made.checkpoint.inside(begun.folder))
    trainer.fit(model, datamodule=data, ckpt_path=options.ckpt_path, weights_only=True)
    data.embed = None
    evaluation = UniverseEvaluation(replace(model.joined(stored), path=begun.folder / SaveUniverse.final), against)
    begun.test(evaluation, "universe")
    if trainer.is_global_zero:
        save_universe(evaluation.stored, data, evaluation.stored.path)


def _with_members(options: Namespace, stored: StoredBank) -> Namespace:
    """The options with the members before the newcomer.

    Raises:
        ValueError: not one model is named, or one that is in the universe.
    """
    members, new = stored.data_config["models"], options.data.models
    if len(new) != 1:
        raise ValueError(f"Expected `data.models` to name the one model that joins, but got {new}.")
    if new[0] in members:
        raise ValueError(f"Expected a model that is not in {stored.path}, but {new[0]} is in it already.")
    revisions = options.data.revisions or [None]
    options.data.models = [*members, *new]
    options.data.revisions = [*(stored.data_config["revisions"] or [None] * len(members)), revisions[-1]]
    return options
