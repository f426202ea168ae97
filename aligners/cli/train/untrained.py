"""Save a model's untrained twin in model/: the same config, with weights drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from jsonargparse import ArgumentParser, Namespace
from transformers import PreTrainedTokenizerBase

from aligners.cli.folders import claim, new_run_folder
from aligners.cli.options import command_parser
from aligners.cli.run import instantiate
from aligners.errors import UserError
from aligners.files.whole import whole_folder
from aligners.models.loading.files import save_model
from datamodules.layers import LayerActivations


def parser() -> ArgumentParser:
    """The options."""
    made = command_parser("untrained", __doc__)
    made.add_class_arguments(LayerActivations, "data", sub_configs=True)
    made.add_argument("--seed", type=int, default=0, help="Of the weights.")
    made.set_defaults({"data.models": ["embedded:0"], "data.max_length": 2})  # nothing is read
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Draw the weights and save them.

    Raises:
        ValueError: not one model was named.
    """
    options: Namespace = parser.parse_args(words)
    if len(options.data.models) != 1:
        raise UserError(f"Expected `data.models` to name one model, but got {options.data.models}.")
    data: LayerActivations = instantiate(parser, options).data
    folder = new_run_folder(options.run, "untrained")
    claim(folder, parser.dump(options))
    (frozen,) = data.frozen
    twin = frozen.untrained(options.seed)
    with whole_folder(folder / "model") as unfinished:
        save_model(unfinished, twin.model, cast(PreTrainedTokenizerBase, twin.tokenizer))
    print(f"Saved {folder / 'model'}")
