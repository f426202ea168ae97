"""Stitch models on held-out text and measure the penalty.

With a checkpoint of `train.py stitch`: its layers. Without: identity stitching between any number of models of one
width, at every block or on the whole grid of site pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jsonargparse import ArgumentParser

from aligners.cli.options import add_data_and_trainer, command_parser, options_of, parse_with_data
from aligners.cli.run import start
from aligners.fitting.bank import load_bank
from aligners.injection.scoring.pair_intervals import check_groups
from aligners.injection.stitching.measuring import StitchingEvaluation
from datamodules.model_texts import stitched_texts


@dataclass
class Options:
    """What is stitched.

    Args:
        checkpoint: File stitching.ckpt. Its data options are this command's defaults.
        groups: Name -> models, for example those that generalise and those that do not: means are then taken over the
            routes within and between groups.
    """

    checkpoint: Path | None = None
    groups: dict[str, list[str]] | None = None


def parser() -> ArgumentParser:
    """The options."""
    made = command_parser("stitching", __doc__, Options)
    made.add_class_arguments(StitchingEvaluation, None, skip={"stored"})
    add_data_and_trainer(made, stitched_texts, batch_size=128)
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Measure and report."""
    options = parser.parse_args(words)
    stored = load_bank(options.checkpoint) if options.checkpoint else None
    if stored is not None:
        options = parse_with_data(parser, words, stored.data_config)
    check_groups(options.groups, options.data.models)
    evaluation = StitchingEvaluation(stored, **options_of(StitchingEvaluation, options))
    start("stitching", parser, options).test(evaluation, "stitching", groups=options.groups)
