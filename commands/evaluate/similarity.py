"""`evaluate.py similarity`: measures between all layers of two or more models."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from commands.options import add_data_and_trainer, command_parser, options_of
from commands.run import start
from datamodules.layers import LayerActivations
from similarity.evaluation import SimilarityEvaluation

__all__ = ["parser", "run"]


def parser() -> ArgumentParser:
    """The options."""
    made = command_parser(
        "similarity",
        "Measure how similar the layers of two or more models are on the same held-out text: heat maps over all layer "
        "pairs, lines along matching layers, one table.",
    )
    made.add_class_arguments(SimilarityEvaluation, None)
    add_data_and_trainer(made, LayerActivations, batch_size=32)
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Compare and report."""
    options = parser.parse_args(words)
    evaluation = SimilarityEvaluation(**options_of(SimilarityEvaluation, options))
    start("similarity", parser, options).test(evaluation, "similarity")
