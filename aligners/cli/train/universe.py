"""`train.py universe`: one space for k models, with a bijection from each into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from aligners.cli.run import instantiate, start
from aligners.cli.train.fit import fit_maps, fit_options, fit_parser, fit_trainer
from aligners.fitting.bank import StoredBank, load_bank
from aligners.fitting.universe.evaluation import UniverseEvaluation, between_members
from aligners.fitting.universe.fitting import UniverseAlignment
from datamodules.pairings import check_widths, universe_states


def parser() -> ArgumentParser:
    """The options."""
    made = fit_parser(
        "universe",
        "Fit k models of one width to one shared space: a bijection u_i for each model, so that the map from model i "
        "into model j is u_i followed by the inverse of u_j, for all pairs from k maps. Every map is measured on "
        "held-out text, and universe.ckpt and pairs/X--Y/aligners.ckpt are written, which `evaluate.py inject` takes.",
        universe_states, UniverseAlignment,
    )  # fmt: skip
    made.add_argument(
        "--against", type=list[Path], default=[],
        help="Files aligners.ckpt of `fit` or `fit_pairs` between models of the universe, to measure beside it.",
    )  # fmt: skip
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Fit, measure and report."""
    options = fit_options("universe", parser, words)
    against = [load_bank(path) for path in options.against]
    made = instantiate(parser, options)
    check_members(made, against)
    made.model.network(1, made.data.frozen_models.widths()[0])
    begun = start("universe", parser, options, made)
    fit_maps(begun, fit_trainer(begun))
    universe = replace(made.model.stored().freeze(), path=begun.folder / UniverseAlignment.final)
    begun.test(UniverseEvaluation(universe, against), "universe")


def check_members(made: Namespace, against: Sequence[StoredBank]) -> None:
    """Raise before anything is trained unless the models have one width, and maps of pairs can be measured beside them.

    Raises:
        ValueError: they have not; or as `between_members`.
    """
    check_widths(list(zip(made.data.models, made.data.frozen_models.widths(), strict=True)))
    if against:
        made.data.prepare_data()
        between_members(against, made.data.describe())
