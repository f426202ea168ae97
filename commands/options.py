"""The options that commands share, and those that a checkpoint gives."""

from __future__ import annotations

from argparse import SUPPRESS
from collections.abc import Callable, Collection, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import ArgumentParser, Namespace

from callbacks.best import BestPerSite

__all__ = [
    "add_data_and_trainer",
    "add_training",
    "check_goes_on",
    "check_trains",
    "command_parser",
    "flat",
    "options_of",
    "parse_with_data",
]


def command_parser(kind: str, description: str) -> ArgumentParser:
    """A parser with the options of every command: `--config`, `--run` and `--traceback`.

    Args:
        kind: what the default folder is called after.
        description: over the list of options.
    """
    parser = ArgumentParser(description=description, usage="%(prog)s [options]")  # all of them stand below it
    parser.add_argument("-c", "--config", action="config", help="YAML file with any of these options.")
    parser.add_argument(
        "--run", type=Path | None, default=None,
        help=f"New folder of this run: config, logs, checkpoints, report. Default: runs/{kind}-<date>-<time>.",
    )  # fmt: skip
    parser.add_argument(
        "--traceback", action="store_true", default=SUPPRESS,
        help="Show where an error comes from. Without, only errors that are no fault of the options do.",
    )  # fmt: skip
    return parser


def add_training(
    parser: ArgumentParser,
    module: type[pl.LightningModule],
    data: type[pl.LightningDataModule],
    saving: type[pl.Callback],
    **defaults: Any,
) -> None:
    """Add the options of a command that trains maps: seed, where to go on from, what is kept, model, data, Trainer.

    Args:
        parser: of the command.
        module: its constructor's arguments become `--model.NAME`.
        data: see `add_data_and_trainer`.
        saving: the callback that writes checkpoints; its arguments become `--checkpoint.NAME`.
        defaults: of the Trainer.
    """
    parser.add_argument(
        "--seed_everything", type=bool | int, default=0,
        help="Seed of Python, NumPy and torch; true: one that is drawn, false: none.",
    )  # fmt: skip
    parser.add_argument(
        "--ckpt_path", type=str | None, default=None,
        help="File last.ckpt of an interrupted run, to go on from; to validate: aligners.ckpt.",
    )  # fmt: skip
    parser.add_class_arguments(BestPerSite, "early_stopping")
    parser.add_class_arguments(saving, "checkpoint")
    parser.add_class_arguments(module, "model", sub_configs=True)
    usual: dict[str, Any] = {"max_epochs": -1, "log_every_n_steps": 20, "enable_model_summary": False}
    add_data_and_trainer(parser, data, **usual, **defaults)  # the number of steps says when training ends


def add_data_and_trainer(
    parser: ArgumentParser,
    data: type[pl.LightningDataModule],
    batch_size: int | None = None,
    skip: Collection[str] = (),
    **defaults: Any,
) -> None:
    """Add the options of a data module and of the Trainer.

    Args:
        parser: of the command.
        data: its constructor's arguments become `--data.NAME`.
        batch_size: default of this command, where it is another than the data module's.
        skip: arguments that are no options of this command.
        defaults: of the Trainer, where they differ from Lightning's.
    """
    parser.add_class_arguments(data, "data", skip=set(skip), sub_configs=True)
    parser.add_class_arguments(pl.Trainer, "trainer", instantiate=False, sub_configs=True)
    defaults = {"enable_checkpointing": False, **defaults}
    sizes = {} if batch_size is None else {"data.batch_size": batch_size}
    parser.set_defaults({**{f"trainer.{name}": value for name, value in defaults.items()}, **sizes})


def check_trains(options: Namespace) -> None:
    """Refuse a Trainer that ends before it has begun: it would save nothing.

    Raises:
        ValueError: naming the option that says so.
    """
    for name in ("max_epochs", "max_steps", "limit_train_batches"):
        if options.trainer[name] == 0:
            raise ValueError(f"Expected `trainer.{name}` to be at least 1, but got 0: nothing would be trained.")


def check_goes_on(path: str | None, command: str, key: str) -> None:
    """Refuse a file that a run cannot go on from, before anything is loaded for it.

    Args:
        path: of the file; None: the run begins anew.
        command: of `train.py`, which wrote the file.
        key: what such a checkpoint has.

    Raises:
        ValueError: there is no such file, or it is another.
    """
    if path is None:
        return
    wanted = f"Expected `ckpt_path` to be a last.ckpt of `train.py {command}`, but"
    if not Path(path).is_file():
        raise ValueError(f"{wanted} there is no such file: {path}.")
    try:
        found = key in torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except Exception as error:  # whatever reading another kind of file runs into
        raise ValueError(f"{wanted} {path} cannot be read as one.") from error
    if not found:
        raise ValueError(f"{wanted} {path} is of another kind of run.")


def options_of(function: Callable[..., Any], options: Namespace) -> dict[str, Any]:
    """The options whose names are arguments of a function or class."""
    return {name: options[name] for name in signature(function).parameters if name in options}


def parse_with_data(parser: ArgumentParser, words: Sequence[str], config: dict[str, Any]) -> Namespace:
    """Parse again, with a checkpoint's data options for defaults.

    Args:
        parser: of the command.
        words: of the command line.
        config: the checkpoint's data options.
    """
    kept = {name: value for name, value in config.items() if name != "batch_size"}  # it changes nothing but the speed
    parser.set_defaults({f"data.{name}": value for name, value in flat(kept).items()})
    return parser.parse_args(words)


def flat(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options with dotted names; a map of labels is one value."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        nested = isinstance(value, dict) and name != "labels"
        found |= flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return found
