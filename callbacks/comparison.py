"""`evaluate.py similarity`: measures between all layers of two or more models."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.utilities import rank_zero_only

from callbacks.run import new_run_folder, progress_bar, run_loggers
from callbacks.similarity_report import SimilarityReport
from datamodules.layers import LayerActivations
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
    folder = new_run_folder(options.run, "similarity")
    if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
        (folder / "config.yaml").write_text(similarity_parser().dump(options))
    settings = {**vars(options.trainer), "use_distributed_sampler": False}
    if settings["logger"] in (None, True):
        settings["logger"] = run_loggers(folder, "similarity")
    callbacks = [*progress_bar(settings["enable_progress_bar"]), SimilarityReport(folder)]
    trainer = pl.Trainer(**settings, callbacks=callbacks)
    trainer.test(evaluation, datamodule=made.data, verbose=False)
