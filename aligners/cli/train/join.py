"""`train.py join`: one more model in a universe, by one fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from aligners.cli.options import parse_with_data
from aligners.cli.run import instantiate, start
from aligners.cli.train.fit import fit_maps, fit_options, fit_parser, fit_trainer
from aligners.cli.train.universe import check_members
from aligners.errors import UserError
from aligners.fitting.bank import StoredBank, load_bank
from aligners.fitting.universe.evaluation import UniverseEvaluation
from aligners.fitting.universe.fitting import Joining, UniverseAlignment
from aligners.fitting.universe.universe import NETWORK, load_universe, universes_of
from callbacks.checkpoint import save_maps
from datamodules.pairings import universe_states


def parser() -> ArgumentParser:
    """The options."""
    made = fit_parser(
        "join",
        "Fit one more model, `--data.models '[NEW]'`, to the shared space of a universe that stays as it is: one fit "
        "for the maps from and to all its members, whose states on the same texts are read.",
        universe_states, Joining,
    )  # fmt: skip
    made.add_argument("--universe", type=Path | None, default=None, help="The file universe.ckpt to join.")
    made.add_argument(
        "--against", type=list[Path], default=[], help="As in `train.py universe`: maps of pairs to measure beside."
    )
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Fit, measure, write the universe of all, and report."""
    options = fit_options("join", parser, words)
    if options.universe is None:
        raise UserError("Expected `universe` to name a file universe.ckpt, but got nothing.")
    stored, against = load_universe(options.universe), [load_bank(path) for path in options.against]
    options = _with_members(parse_with_data(parser, words, {**stored.data_config, "models": []}), stored)
    made = instantiate(parser, options)
    model, data = made.model, made.data
    check_members(made, against)
    begun = start("join", parser, options, made)
    data.prepare_data()
    model.refuse_other_members(stored, data)
    model.members = universes_of(stored)[NETWORK]
    trainer = fit_trainer(begun)
    fit_maps(begun, trainer)
    evaluation = UniverseEvaluation(replace(model.joined(stored), path=begun.folder / UniverseAlignment.final), against)
    begun.test(evaluation, "universe")
    if trainer.is_global_zero:
        save_maps(evaluation.stored, data, evaluation.stored.path)


def _with_members(options: Namespace, stored: StoredBank) -> Namespace:
    """The options with the members before the newcomer.

    Raises:
        ValueError: not one model is named, or one that is in the universe.
    """
    members, new = stored.data_config["models"], options.data.models
    if len(new) != 1:
        raise UserError(f"Expected `data.models` to name the one model that joins, but got {new}.")
    if new[0] in members:
        raise UserError(f"Expected a model that is not in {stored.path}, but {new[0]} is in it already.")
    revisions = options.data.revisions or [None]
    options.data.models = [*members, *new]
    options.data.revisions = [*(stored.data_config["revisions"] or [None] * len(members)), revisions[-1]]
    return options
