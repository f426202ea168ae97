"""`evaluate.py surgery`: classifiers truncated after every layer, and without every span of layers."""

from __future__ import annotations

import warnings
from dataclasses import fields
from pathlib import Path

import lightning.pytorch as pl
from jsonargparse import ArgumentParser, Namespace

from commands.run import progress_bar, start_evaluation
from datamodules.labelled import LabelledTexts
from finetuning.training import FinetuningRecipe
from finetuning.truncating import HEADS, SurgeryEvaluation
from reports.surgery.report import SurgeryReport

__all__ = ["operate", "surgery_parser"]


def surgery_parser() -> ArgumentParser:
    """The options of `evaluate.py surgery`."""
    parser = ArgumentParser(
        description="Truncate fine-tuned classifiers after every layer and skip every span of layers, on held-out "
        "text: accuracy with the model's own head (untuned), with a head trained on the states there (tuned), and with "
        "one trained on the base model's states (tuned_orig, where `data.bases` are named), as Phang et al. 2021, "
        "Figures 3 and 4. Several models, such as seeds, give a mean and each. Without heads: `--trainer.max_epochs 0`."
    )
    parser.add_argument("--config", action="config", help="YAML file with any of these options.")
    parser.add_argument(
        "--run", type=Path | None, default=None,
        help="New folder of the report. Default: runs/surgery-<date>-<time>.",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="Of the resampling of texts for intervals.")
    parser.add_class_arguments(FinetuningRecipe, None)
    parser.add_class_arguments(LabelledTexts, "data", skip={"dtype"})
    parser.add_class_arguments(pl.Trainer, "trainer", skip={"callbacks"}, instantiate=False)
    parser.set_defaults(
        {
            **vars(HEADS),
            "trainer.max_epochs": 3,
            "trainer.num_sanity_val_steps": 0,
            "trainer.enable_checkpointing": False,
            "trainer.enable_model_summary": False,
            "trainer.log_every_n_steps": 20,
        }
    )
    return parser


def operate(options: Namespace, made: Namespace) -> None:
    """Train the heads and measure, through the Trainer.

    Args:
        options: what was asked for, as plain values.
        made: the same, with the data module instantiated.
    """
    recipe = FinetuningRecipe(**{field.name: options[field.name] for field in fields(FinetuningRecipe)})
    evaluation = SurgeryEvaluation(recipe, options.trainer.max_epochs != 0, options.seed)
    given = surgery_parser().dump(options)
    folder, settings = start_evaluation("surgery", options.run, vars(options.trainer), given)
    callbacks = [*progress_bar(settings["enable_progress_bar"]), SurgeryReport(folder)]
    trainer = pl.Trainer(**settings, callbacks=callbacks)
    if evaluation.heads:
        warnings.filterwarnings("ignore", message=".*in eval mode at the start of training.*")  # heads without dropout
        trainer.fit(evaluation, datamodule=made.data)
        if trainer.interrupted:
            raise KeyboardInterrupt
    trainer.test(evaluation, datamodule=made.data, verbose=False)
