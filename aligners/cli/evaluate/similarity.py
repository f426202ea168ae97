"""Measure how similar the layers of two or more models are on the same held-out text.

It draws heat maps over all layer pairs, and lines along matching layers, beside one table. The same command with the
same `--run`, after an interruption, goes on after the last finished pass over the texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from jsonargparse import ArgumentParser

from aligners.cli.endings import goes_on_with
from aligners.cli.folders import is_begun, rank
from aligners.cli.options import add_data_and_trainer, check_begun, command_parser, options_of
from aligners.cli.run import start
from aligners.similarity.evaluation import SimilarityEvaluation
from aligners.similarity.passes.saved import PASSES
from datamodules.layers import LayerActivations

RESULT = "similarity.json"


@dataclass
class Options:
    """What is reported.

    Args:
        each_pair: Figures and a table of each pair of models. Default: up to a dozen pairs; one figure for all of more.
    """

    each_pair: bool | None = None


def parser() -> ArgumentParser:
    """The options."""
    made = command_parser("similarity", __doc__, Options)
    made.add_class_arguments(SimilarityEvaluation, None)
    add_data_and_trainer(made, LayerActivations, batch_size=32)
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Compare and report; with the folder of a comparison that was stopped, go on after its last finished pass."""
    options = parser.parse_args(words)
    evaluation = SimilarityEvaluation(**options_of(SimilarityEvaluation, options))
    begun = _is_begun(options.run)
    if begun:
        check_begun(options.run, yaml.safe_load(parser.dump(options)))
    this = start("similarity", parser, options, begun=begun)
    saved = evaluation.keep_passes(this.folder / PASSES)
    with goes_on_with(f" with `--run {this.folder}`"):
        this.test(evaluation, "similarity", each_pair=options.each_pair)
    if rank() == 0:
        saved.remove()


def _is_begun(folder: Path | None) -> bool:
    """Whether a folder holds a comparison that was stopped."""
    return folder is not None and is_begun(folder) and ((folder / PASSES).exists() or not (folder / RESULT).exists())
