"""`evaluate.py similarity`: measures between all layers of two or more models."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
from jsonargparse import ArgumentParser, Namespace

from commands.run import progress_bar, start_evaluation
from datamodules.layers import LayerActivations
from reports.similarity.report import SimilarityReport
from similarity.evaluation import SimilarityEvaluation

__all__ = ["compare", "similarity_parser"]


def similarity_parser() -> ArgumentParser:
    """The options of `evaluate.py similarity`."""
    parser = ArgumentParser(
        description="Measure how similar the layers of two or more models are on the same held-out text: heat maps "
        "over all layer pairs, lines along matching layers, one table."
    )
    parser.add_argument("--config", action="config", help="YAML file with any of these options.")
    parser.add_argument(
        "--run",
        type=Path | None,
        default=None,
        help="New folder of the report. Default: runs/similarity-<date>-<time>.",
    )
    parser.add_class_arguments(SimilarityEvaluation, None)
    parser.add_class_arguments(LayerActivations, "data")
    parser.add_class_arguments(pl.Trainer, "trainer", skip={"callbacks"}, instantiate=False)
    parser.set_defaults({"data.batch_size": 32, "trainer.enable_checkpointing": False})
    return parser


def compare(options: Namespace, made: Namespace) -> None:
    """Run the comparison through the Trainer.

    Args:
        options: what was asked for, as plain values.
        made: the same, with the data module instantiated.
    """
    names = [name for name in vars(options) if name not in ("config", "run", "data", "trainer")]
    evaluation = SimilarityEvaluation(**{name: options[name] for name in names})
    given = similarity_parser().dump(options)
    folder, settings = start_evaluation("similarity", options.run, vars(options.trainer), given)
    callbacks = [*progress_bar(settings["enable_progress_bar"]), SimilarityReport(folder)]
    trainer = pl.Trainer(**settings, callbacks=callbacks)
    trainer.test(evaluation, datamodule=made.data, verbose=False)
