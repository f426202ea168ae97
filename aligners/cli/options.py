"""Options that commands share, and options that come from a checkpoint."""

from __future__ import annotations

from argparse import SUPPRESS
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from inspect import isclass, signature
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from jsonargparse import ArgumentParser, Namespace, class_from_function

from aligners.cli.folders import CONFIG
from aligners.cli.imports import Imported
from aligners.errors import UserError
from callbacks.best import BestPerSite

# Options, or prefixes of them, that may differ when a run is resumed: they do not change what the result means.
FREE = (
    *("run", "config", "traceback", "upload", "ckpt_path", "sites_at_once", "checkpoint.", "memory", "data.workers"),
    *("data.cache", "data.store", "data.trust_remote_code", "data.devices", "data.device_map", "trainer.accelerator"),
    *("trainer.devices", "trainer.num_nodes", "trainer.strategy", "trainer.logger", "trainer.log_every_n_steps"),
    *("trainer.enable_", "trainer.default_root_dir", "trainer.profiler", "trainer.benchmark"),
)


@dataclass
class RunOptions:
    """The run.

    Args:
        imports: Python files or modules with maps, measures or model families of your own, imported before they are
            named: give them first. They are run: name only what you trust.
        upload: Upload the maps, layers or probes that the run leaves, as artifacts of its W&B run. By default W&B gets
            only their names, sizes, checksums and places.
    """

    imports: list[Imported] = field(default_factory=list)
    upload: bool = False


@dataclass
class TrainingOptions:
    """How it begins.

    Args:
        seed_everything: Seed for Python, NumPy and torch. `true` draws one, `false` sets none.
        ckpt_path: The last.ckpt of an interrupted run, to resume it; for `validate`, an aligners.ckpt.
    """

    seed_everything: bool | int = 0
    ckpt_path: str | None = None


def command_parser(kind: str, description: str | None, options: type | None = None) -> ArgumentParser:
    """Make a parser with the options of every command that leaves a run: `--config`, `--run` and `RunOptions`.

    Args:
        kind: first part of the default folder's name.
        description: shown above the list of options: what the command's module says of itself.
        options: a dataclass whose fields are options of this command, explained by its docstring.
    """
    parser = bare_parser(description, "[options]", options)
    parser.add_argument("-c", "--config", action="config", help="YAML file with any of these options.")
    parser.add_argument(
        "--run", type=Path | None, default=None,
        help=f"New folder for this run: config, logs, checkpoints, report. Default: runs/{kind}-<date>-<time>.",
    )  # fmt: skip
    parser.add_class_arguments(RunOptions, None)
    return parser


def bare_parser(description: str | None, usage: str, options: type | None = None) -> ArgumentParser:
    """Make a parser of a command that leaves no run, with `--traceback`.

    Args:
        description: see `command_parser`.
        usage: the words after the command's name; the list of options that follows names them all.
        options: see `command_parser`; what has no default is given in this order, without its name.
    """
    parser = ArgumentParser(description=description, usage=f"%(prog)s {usage}")
    if options is not None:
        parser.add_class_arguments(options, None, as_positional=True)
    add_traceback(parser)
    return parser


def add_traceback(parser: ArgumentParser) -> None:
    """Add the option `--traceback`, which every command has."""
    parser.add_argument(
        "--traceback", action="store_true", default=SUPPRESS,
        help="Show the traceback of every error, even of one that other options would mend.",
    )  # fmt: skip


def add_training(
    parser: ArgumentParser,
    module: type[pl.LightningModule],
    data: Callable[..., pl.LightningDataModule],
    saving: type[pl.Callback],
    **defaults: Any,
) -> None:
    """Add the options of a command that trains maps: seed, checkpoint to resume, saving, model, data, Trainer.

    Args:
        parser: the command's parser.
        module: its constructor's arguments become `--model.NAME`.
        data: see `add_data_and_trainer`.
        saving: the callback that writes checkpoints; its arguments become `--checkpoint.NAME`.
        defaults: Trainer options whose defaults differ from Lightning's.
    """
    parser.add_class_arguments(TrainingOptions, None)
    parser.add_class_arguments(BestPerSite, "early_stopping")
    parser.add_class_arguments(saving, "checkpoint")
    parser.add_class_arguments(module, "model", sub_configs=True)
    usual: dict[str, Any] = {"max_epochs": -1, "log_every_n_steps": 20, "enable_model_summary": False}
    add_data_and_trainer(parser, data, **usual, **defaults)  # training ends after a number of steps


def add_data_and_trainer(
    parser: ArgumentParser,
    data: Callable[..., pl.LightningDataModule],
    batch_size: int | None = None,
    skip: Collection[str] = (),
    **defaults: Any,
) -> None:
    """Add the options of a data module and of the Trainer.

    Args:
        parser: the command's parser.
        data: makes the data module; its arguments become `--data.NAME`.
        batch_size: this command's default, if it differs from the data module's.
        skip: arguments that this command does not offer.
        defaults: Trainer options whose defaults differ from Lightning's.
    """
    kind = data if isclass(data) else class_from_function(data)
    parser.add_class_arguments(kind, "data", skip=set(skip), sub_configs=True)
    parser.add_class_arguments(pl.Trainer, "trainer", instantiate=False, sub_configs=True)
    defaults = {"enable_checkpointing": False, **defaults}
    sizes = {} if batch_size is None else {"data.batch_size": batch_size}
    parser.set_defaults({**{f"trainer.{name}": value for name, value in defaults.items()}, **sizes})


def check_trains(options: Namespace) -> None:
    """Raise if the Trainer would end before it begins, and save nothing.

    Raises:
        ValueError: an option is 0.
    """
    for name in ("max_epochs", "max_steps", "limit_train_batches"):
        if options.trainer[name] == 0:
            raise UserError(f"Expected `trainer.{name}` to be at least 1, but got 0: nothing would be trained.")


def check_goes_on(path: str | None, command: str, key: str) -> None:
    """Raise if a run cannot be resumed from a file. Nothing is loaded for the run yet.

    Args:
        path: the checkpoint; None for a run that begins anew.
        command: the command of `train.py` that writes such checkpoints.
        key: an entry that they all have.

    Raises:
        ValueError: there is no such file, or it is something else.
    """
    if path is None:
        return
    wanted = f"Expected `ckpt_path` to be a last.ckpt of `train.py {command}`, but"
    if not Path(path).is_file():
        raise UserError(f"{wanted} there is no such file: {path}.")
    try:
        found = key in torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except Exception as error:  # reading any other file can raise anything
        raise UserError(f"{wanted} {path} cannot be read as one.") from error
    if not found:
        raise UserError(f"{wanted} {path} is of another kind of run.")


def options_of(function: Callable[..., Any], options: Namespace) -> dict[str, Any]:
    """Select the options that a function or class takes as arguments."""
    return {name: options[name] for name in signature(function).parameters if name in options}


def parse_with_data(parser: ArgumentParser, words: Sequence[str], config: dict[str, Any]) -> Namespace:
    """Parse the command line again, with a checkpoint's data options as defaults.

    Args:
        parser: the command's parser.
        words: the command line.
        config: the checkpoint's data options.

    Raises:
        ValueError: the checkpoint has options that this version does not know.
    """
    # The first affects nothing but speed; a file that somebody else wrote must not allow foreign code to run.
    kept = {name: value for name, value in config.items() if name not in ("batch_size", "trust_remote_code")}
    try:
        parser.set_defaults({f"data.{name}": value for name, value in flat(kept).items()})
    except KeyError as error:
        raise UserError(
            f"Expected a checkpoint of this version or an earlier one, but its data options are not all known here: "
            f"{error.args[0]}. Update the package to read it."
        ) from error
    return parser.parse_args(words)


def check_begun(folder: Path, options: dict[str, Any]) -> None:
    """Raise unless a run was begun in a folder with the options that it is to go on with.

    Args:
        folder: of the run.
        options: as plain values.

    Raises:
        ValueError: config.yaml is damaged, or says something else; options that change no result may differ.
    """
    try:
        written = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except yaml.YAMLError:
        written = None
    if not isinstance(written, dict):
        raise UserError(
            f"Expected {folder / CONFIG} to hold the options of a run, but it holds none. Name a new `--run`."
        )
    begun, now = flat(written), flat(options)
    names = [name for name in {**begun, **now} if not name.startswith(FREE)]
    differences = [name for name in names if begun.get(name) != now.get(name)]
    if differences:
        listed = "; ".join(f"{name} was {begun.get(name)!r} and is {now.get(name)!r}" for name in differences[:4])
        raise UserError(
            f"Expected the options with which {folder} was begun, but got others: {listed}. Give the same options to "
            "go on, or name a new folder with `--run`."
        )


def flat(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested options to dotted names; a map of labels stays one value."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        nested = isinstance(value, dict) and name != "labels"
        found |= flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return found
