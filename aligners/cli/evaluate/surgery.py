"""Truncate fine-tuned classifiers after every layer and skip every span of layers, on held-out text.

It measures accuracy with the model's own head (untuned), with a head trained on the states there (tuned), and with one
trained on the base model's states (tuned_orig, where `data.bases` are named), as Phang et al. 2021, Figures 3 and 4.
Several models, such as seeds, give a mean and each. Without heads: `--trainer.max_epochs 0`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from jsonargparse import ArgumentParser

from aligners.cli.options import add_data_and_trainer, command_parser, options_of
from aligners.cli.run import start
from aligners.finetuning.training import FinetuningRecipe
from aligners.finetuning.truncating import HEADS, SurgeryEvaluation
from aligners.reports.publishing import WriteReport
from datamodules.model_texts import labelled_texts


@dataclass
class Options:
    """How it is measured.

    Args:
        seed: Of the resampling of texts for intervals.
    """

    seed: int = 0


def parser() -> ArgumentParser:
    """The options."""
    made = command_parser("surgery", __doc__, Options)
    made.add_class_arguments(FinetuningRecipe, None)
    add_data_and_trainer(
        made,
        labelled_texts,
        skip={"dtype"},
        max_epochs=3,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        log_every_n_steps=20,
    )
    made.set_defaults(vars(HEADS))
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Train the heads, measure and report."""
    options = parser.parse_args(words)
    recipe = FinetuningRecipe(**options_of(FinetuningRecipe, options))
    evaluation = SurgeryEvaluation(recipe, options.trainer.max_epochs != 0, options.seed)
    begun = start("surgery", parser, options)
    trainer, data = begun.trainer(WriteReport("surgery", begun.folder)), begun.made.data
    if evaluation.heads:
        warnings.filterwarnings("ignore", message=".*in eval mode at the start.*")  # the heads have no dropout
        trainer.fit(evaluation, datamodule=data)
    trainer.test(evaluation, datamodule=data, verbose=False)
