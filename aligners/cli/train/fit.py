"""`train.py fit`: aligners between the states of two frozen models; and what all commands that fit maps share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import lightning.pytorch as pl
from jsonargparse import ArgumentParser, Namespace

from aligners.cli.options import add_training, check_goes_on, check_trains, command_parser
from aligners.cli.run import Run, instantiate, start
from aligners.errors import UserError, check_range
from aligners.files.room import free_memory
from aligners.fitting.alignment import Alignment
from aligners.fitting.bank import ALIGNMENT, StoredBank
from aligners.fitting.parts import bytes_a_site, check_part, find_part, join_parts, sites_at_once
from callbacks.checkpoint import SaveAligners
from callbacks.progress import FitSummary
from datamodules.pairings import pair_states
from datamodules.states import States

FIT = "Fit aligners between the states of two frozen models, and show how exact they are."


def fit_parser(
    kind: str,
    description: str,
    data: Callable[..., States] = pair_states,
    module: type[Alignment] = Alignment,
) -> ArgumentParser:
    """The options of a command that fits maps.

    Args:
        kind: name of the command.
        description: shown above the list of options.
        data: makes the states.
        module: what is fitted.
    """
    made = command_parser(kind, description)
    add_training(made, module, data, SaveAligners, num_sanity_val_steps=0)
    return made


def fit_options(kind: str, parser: ArgumentParser, words: Sequence[str]) -> Namespace:
    """Parse the options of a command that fits maps, and check that it trains something, or goes on with a run."""
    options = parser.parse_args(words)
    check_trains(options)
    if kind != "fit" or options.ckpt_path is None or not Path(options.ckpt_path).is_dir():  # that of a fit in parts
        check_goes_on(options.ckpt_path, kind, ALIGNMENT)
    return options


def check_maps(made: Namespace) -> None:
    """Raise if a map cannot have the widths of the pairs, before any model is made or loaded."""
    widths = made.data.frozen_models.widths()
    for a, b in made.data.numbers:
        for _ in made.model.made(1, widths[a], widths[b]):
            pass


def fit_trainer(run: Run, *callbacks: pl.Callback) -> pl.Trainer:
    """Make a Trainer that keeps each site's best parameters and saves the maps."""
    return run.trainer(run.made.early_stopping, run.made.checkpoint.inside(run.folder), *callbacks)


def fit_maps(run: Run, trainer: pl.Trainer) -> None:
    """Fit. Only tensors and plain values are read from a checkpoint."""
    trainer.fit(run.made.model, datamodule=run.made.data, ckpt_path=run.options.ckpt_path, weights_only=True)


def fit_and_show(run: Run, trainer: pl.Trainer) -> None:
    """Fit, and show what the best parameters reach on the validation texts."""
    fit_maps(run, trainer)
    trainer.validate(run.made.model, datamodule=run.made.data, verbose=False)


def fit_and_measure(kind: str, report: str, parser: ArgumentParser, words: Sequence[str]) -> None:
    """Fit, then measure the errors on held-out texts, and report.

    Args:
        kind: name of the command.
        report: kind of its report.
        parser: see `run`.
        words: likewise.
    """
    begun = start(kind, parser, fit_options(kind, parser, words))
    fit_maps(begun, fit_trainer(begun, FitSummary(begun.folder)))
    begun.test(begun.made.model, report)


def parser(kind: str = "fit", description: str = FIT) -> ArgumentParser:
    """The options of `fit` and `validate`."""
    made = fit_parser(kind, description)
    made.add_argument(
        "--sites_at_once", type=int | None, default=None,
        help="Train a bank so many sites at a time, in runs part-1-1, part-2-1, ... of this run's folder. Default: "
        "all sites, or as many as fit in memory. `--ckpt_path FOLDER` goes on with the parts of a run.",
    )  # fmt: skip
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Fit, all sites at once or in parts, and show what the best parameters reach."""
    options = fit_options("fit", parser, words)
    made = instantiate(parser, options)
    check_maps(made)
    begun = start("fit", parser, options, made)
    trainer = fit_trainer(begun, FitSummary(begun.folder))
    at_once = _sites_at_once(begun, trainer)
    if at_once is not None:
        made.model.adopt(_fit_in_parts(parser, begun, at_once))
        trainer.validate(made.model, datamodule=made.data, verbose=False)
        return
    if options.ckpt_path and Path(options.ckpt_path).is_dir():
        raise UserError(
            f"Expected `ckpt_path` to be a file, but {options.ckpt_path} is a folder, as of a run in parts, and all "
            "sites are trained together here. Name its last.ckpt, or set `sites_at_once`."
        )
    fit_and_show(begun, trainer)


def _sites_at_once(run: Run, trainer: pl.Trainer) -> int | None:
    """Return how many sites are trained together; None for all."""
    wanted, model, data = run.options.sites_at_once, run.made.model, run.made.data
    if trainer.world_size > 1:
        if wanted is not None:
            raise UserError(
                f"`sites_at_once` is for one process, but `trainer.devices` makes {trainer.world_size}. Fit some sites "
                "at a time with `data.sites`."
            )
        return None
    check_range(least=1, sites_at_once=wanted)
    data.prepare_data()
    reader = data.reader
    d_x, d_y = reader.widths
    each = bytes_a_site(model, d_x, d_y, data.batch_size * data.max_length)
    weights = [weight for model in (reader.model_x, reader.model_y) for weight in model.model.parameters()]
    free = free_memory(trainer.strategy.root_device) - sum(w.numel() * w.element_size() for w in weights)
    at_once = min(len(reader.sites), wanted or sites_at_once(len(reader.sites), each, free))
    return at_once if at_once < len(reader.sites) else None


def _fit_in_parts(parser: ArgumentParser, run: Run, at_once: int) -> StoredBank:
    """Fit each part as a run of its own, unless an interrupted run has finished it, and join the parts."""
    sites = [f"{i}:{j}" for i, j in run.made.data.reader.sites]
    parts = [",".join(sites[first : first + at_once]) for first in range(0, len(sites), at_once)]
    folder = Path(run.options.ckpt_path) if run.options.ckpt_path else run.folder
    print(f"{len(sites)} site pairs are trained {at_once} at a time, in {len(parts)} parts, in {folder}.", flush=True)
    files = []
    for number, part in enumerate(parts, start=1):
        place, done, last = find_part(folder, number)
        if done is None:
            print(f"\nPart {number} of {len(parts)}: {part}", flush=True)
            done = _fit_part(parser, run.options, part, place, last)
            if not done.is_file():
                raise UserError(
                    f"Expected part {number} to leave {done}, but it has not: there was nothing left to train. "
                    f"Remove {place.parent / f'part-{number}-*'} and go on with `--ckpt_path {folder}`."
                )
        else:
            check_part(done, part, run.made.model, run.made.data)
        files.append(done)
    return join_parts(files, run.folder)


def _fit_part(parser: ArgumentParser, options: Namespace, sites: str, folder: Path, last: Path | None) -> Path:
    """Fit some sites in a folder of their own, resuming from `last`, and return the path of their aligners."""
    part = options.clone()
    part.data.sites, part.run, part.checkpoint.folder, part.trainer.logger = sites, folder, None, False
    part.ckpt_path = None if last is None else str(last)
    begun = start("fit", parser, part)
    fit_and_show(begun, fit_trainer(begun, FitSummary(folder)))
    return folder / "aligners.ckpt"
