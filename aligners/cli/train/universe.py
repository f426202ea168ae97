"""`train.py universe`: one space for k models, with a bijection from each into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jsonargparse import ArgumentParser

from aligners.cli.options import add_training, check_goes_on, check_trains, command_parser
from aligners.cli.run import instantiate, start
from aligners.fitting.storage.bank import ALIGNMENT, StoredBank, load_bank
from aligners.fitting.universe.evaluation import UniverseEvaluation, between_members
from aligners.fitting.universe.fitting import UniverseAlignment
from callbacks.checkpoint import SaveUniverse
from datamodules.universe import UniverseStates, check_widths

__all__ = ["check_against", "parser", "run"]


def parser() -> ArgumentParser:
    """The options."""
    made = command_parser(
        "universe",
        "Fit k models of one width to one shared space: a bijection u_i for each model, so that the map from model i "
        "into model j is u_i followed by the inverse of u_j, for all pairs from k maps. Every map is measured on "
        "held-out text, and universe.ckpt and pairs/X--Y/aligners.ckpt are written, which `evaluate.py inject` takes.",
    )
    made.add_argument(
        "--against", type=list[Path], default=[],
        help="Files aligners.ckpt of `fit` or `fit_pairs` between models of the universe, to measure beside it.",
    )  # fmt: skip
    add_training(made, UniverseAlignment, UniverseStates, SaveUniverse, num_sanity_val_steps=0)
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Fit, measure and report."""
    options = parser.parse_args(words)
    check_trains(options)
    check_goes_on(options.ckpt_path, "universe", ALIGNMENT)
    against = [load_bank(path) for path in options.against]
    made = instantiate(parser, options)
    check_widths(list(zip(made.data.models, made.data.pipeline.models.widths(), strict=True)))
    made.model.check(made.data.pipeline.models.widths()[0])
    check_against(against, made.data)
    begun = start("universe", parser, options, made)
    trainer = begun.trainer(made.early_stopping, made.checkpoint.inside(begun.folder))
    trainer.fit(made.model, datamodule=made.data, ckpt_path=options.ckpt_path, weights_only=True)
    universe = replace(made.model.stored().freeze(), path=begun.folder / SaveUniverse.final)
    begun.test(UniverseEvaluation(universe, against), "universe")


def check_against(against: Sequence[StoredBank], data: UniverseStates) -> None:
    """Raise before anything is trained unless maps of pairs can be measured beside a universe of these states.

    Raises:
        ValueError: as `between_members`.
    """
    if against:
        data.prepare_data()
        between_members(against, data.describe())
