"""The commands that fit maps between the states of two models or of many pairs, and show or measure their errors."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import yaml

from aligners.callbacks.checkpoint import SaveAligners
from aligners.callbacks.fit_summary import FitSummary
from aligners.cli.command import Run, trains, unchecked
from aligners.cli.folders import CONFIG
from aligners.cli.options import check_goes_on
from aligners.datamodules.pairings import attention_states, pair_states, pairs_states
from aligners.datamodules.rows.policies import most_rows
from aligners.errors import UserError, check_range
from aligners.files.resources import free_memory
from aligners.fitting.alignment import Alignment
from aligners.fitting.bijection.recovering import target_states
from aligners.fitting.parts import (
    bytes_a_site,
    check_part,
    find_part,
    join_parts,
    pairs_within,
    sites_at_once,
)
from aligners.fitting.saved_bank import ALIGNMENT, StoredBank, load_bank
from aligners.progress import tell

# Decorates a function to make it a command that fits maps.
fits = partial(
    trains,
    module=Alignment,
    data=pair_states,
    saving=SaveAligners,
    num_sanity_val_steps=0,
)


@dataclass
class Parts:
    """The number of sites at a time.

    Args:
        sites_at_once: Train this many sites of a bank at a time, in runs part-1-1, part-2-1, ... of this run's folder.
            Default: all sites, or as many as fit in memory. `--ckpt_path FOLDER` goes on with the parts of a run.
    """

    sites_at_once: int | None = None


def begin(run: Run) -> pl.Trainer:
    """Start a run, unless its `ckpt_path` is of another kind, and make a Trainer that shows the last figures."""
    check_resumed(run)
    run.start()
    return run.training(FitSummary(run.folder))


def check_resumed(run: Run) -> None:
    """Raise if `ckpt_path` is of another kind of run."""
    path = run.options.ckpt_path
    in_parts = run.command.kind == "fit" and path is not None and Path(path).is_dir()
    if not in_parts:
        check_goes_on(path, run.command.kind, ALIGNMENT)


def check_widths(run: Run) -> None:
    """Raise if a map cannot have the widths of the pairs, before any model is made or loaded."""
    widths = run.made.data.frozen_models.widths()
    for a, b in run.made.data.numbers:
        list(run.made.model.made(1, widths[a], widths[b]))


def fit_and_show(run: Run, trainer: pl.Trainer) -> None:
    """Fit, and show what the best parameters reach on the validation texts."""
    run.fit(trainer)
    show(run, trainer)


def show(run: Run, trainer: pl.Trainer) -> None:
    """Show what the best parameters reach on the validation texts."""
    trainer.validate(run.made.model, datamodule=run.made.data, verbose=False)


def fit_and_measure(run: Run, report: str) -> None:
    """Fit, measure the errors on held-out texts, and write a report of this kind."""
    run.fit(begin(run))
    run.test(run.made.model, report)


@fits("fit", Parts)
def fit(run: Run) -> None:
    """Fit aligners between the states of two frozen models, and show how exact they are.

    Example: `--data.model_x embedded:0 --data.model_y embedded:1 --model.aligners linear mlp --run runs/mine`
    """
    check_widths(run)
    trainer, resumed = begin(run), run.options.ckpt_path
    at_once = _sites_at_once(run, trainer)
    if at_once is not None:
        run.made.model.adopt(_fit_in_parts(run, at_once))
        show(run, trainer)
    elif resumed and Path(resumed).is_dir():
        raise UserError(
            f"Expected `ckpt_path` to be a file, but {resumed} is a folder, as a run in parts writes it, and "
            "all sites are trained together here. Name its last.ckpt, or set `sites_at_once`."
        )
    else:
        fit_and_show(run, trainer)


def _sites_at_once(run: Run, trainer: pl.Trainer) -> int | None:
    """Return how many sites are trained together; None for all."""
    wanted, data = run.options.sites_at_once, run.made.data
    check_range(least=1, sites_at_once=wanted)
    if trainer.world_size > 1:
        if wanted is None:
            return None
        raise UserError(
            f"`sites_at_once` is for one process, but `trainer.devices` starts {trainer.world_size}. Fit some sites "
            "at a time with `data.sites`."
        )
    data.prepare_data()  # models are loaded here; by several ranks when Lightning sets up
    sites = len(data.reader.sites)
    wanted = wanted or _begun_with(Path(run.options.ckpt_path or ""))
    at_once = wanted or _sites_in_memory(run, trainer)
    return at_once if at_once < sites else None


def _sites_in_memory(run: Run, trainer: pl.Trainer) -> int:
    """Return how many sites fit in the free memory, beside the models."""
    data = run.made.data
    reader = data.reader
    d_x, d_y = reader.widths
    device = trainer.strategy.root_device
    rows = data.batch_size * data.max_length
    on_gpu = device.type == "cuda"
    a_site = bytes_a_site(run.made.model, d_x, d_y, rows, on_gpu=on_gpu)
    free = free_memory(device)
    for model in (reader.model_x, reader.model_y):
        free -= model.nbytes
    return sites_at_once(len(reader.sites), a_site, free)


def _begun_with(folder: Path) -> int | None:
    """Return the sites at a time of an interrupted run, whatever memory is free now; None: it is not in parts."""
    first = folder / "part-1-1" / CONFIG
    if not first.is_file():
        return None
    return len(yaml.safe_load(first.read_text())["data"]["sites"].split(","))


def _fit_in_parts(run: Run, at_once: int) -> StoredBank:
    """Fit each part as a run of its own, unless an interrupted run has finished it, and join the parts."""
    sites = [f"{i}:{j}" for i, j in run.made.data.reader.sites]
    parts = [
        ",".join(sites[first : first + at_once])
        for first in range(0, len(sites), at_once)
    ]
    folder = Path(run.options.ckpt_path or run.folder)
    tell(
        f"{len(sites)} site pairs are trained {at_once} at a time, in {len(parts)} parts, in {folder}."
    )
    files = []
    for number, part in enumerate(parts, start=1):
        place, done, last = find_part(folder, number)
        if done is None:
            tell(f"\nPart {number} of {len(parts)}: {part}")
            done = _fit_part(run, part, place, last)
            if not done.is_file():
                raise UserError(
                    f"Expected part {number} to leave {done}, but it did not: there was nothing left to train. "
                    f"Remove {place.parent / f'part-{number}-*'} and go on with `--ckpt_path {folder}`."
                )
        else:
            check_part(done, part, run.made.model, run.made.data)
        files.append(done)
    return join_parts(files, run.folder)


def _fit_part(run: Run, sites: str, folder: Path, last: Path | None) -> Path:
    """Fit some sites in a folder of their own, resuming from `last`, and return the path of their aligners."""
    options = run.options.clone()
    options.data.sites, options.run = sites, folder
    options.checkpoint.folder, options.trainer.logger = None, False
    options.ckpt_path = None if last is None else str(last)
    part = Run(run.command, run.parser, options)
    fit_and_show(part, begin(part))
    return folder / "aligners.safetensors"


@fits("validate", Parts, check=unchecked)
def validate(run: Run) -> None:
    """Show the figures of a checkpoint's aligners on the validation texts.

    Example: `--ckpt_path runs/mine/aligners.safetensors`
    """
    model = run.made.model
    if run.options.ckpt_path is None:
        raise UserError(
            "Expected `ckpt_path` to name the file aligners.safetensors of a fit, but got nothing."
        )
    stored = load_bank(run.options.ckpt_path)
    run.start()
    model.adopt(stored)
    show(run, run.training(FitSummary(run.folder)))


@fits("fit_pairs", data=pairs_states)
def fit_pairs(run: Run) -> None:
    """Fit aligners of many pairs of models at once: one bank of pairs x sites, every model read once a batch.

    Each pair gets a file pairs/X--Y/aligners.safetensors, as `fit` would write it.

    Example: `--data.models embedded:0 embedded:1 embedded:2 --data.sites 2 --run runs/pairs`
    """
    check_widths(run)
    trainer = begin(run)
    run.made.data.prepare_data()
    _check_memory(run, trainer)
    fit_and_show(run, trainer)


def _check_memory(run: Run, trainer: pl.Trainer) -> None:
    """Raise if the bank would not fit in memory."""
    data, reader, pairs = (
        run.made.data,
        run.made.data.reader,
        len(run.made.data.numbers),
    )
    d_x, d_y = reader.widths
    device = trainer.strategy.root_device
    rows = most_rows(data.rows, data.batch_size, data.max_length)
    on_gpu = device.type == "cuda"
    a_site = bytes_a_site(run.made.model, d_x, d_y, rows, on_gpu=on_gpu)
    free = free_memory(device)
    sites = len(reader.sites) // pairs
    most = pairs_within(free, sites, a_site, 0)  # the models are loaded
    if most < pairs:
        raise UserError(
            f"Expected memory for {pairs} pairs of models, but there is enough for {most} only: a pair has {sites} "
            "sites, at "
            f"{a_site / 2**30:.1f} GiB each, and {free / 2**30:.1f} GiB are free. Name fewer of `data.pairs` at a time "
            "(`fit.pairs_at_once` of a study), fewer `aligners`, or a smaller `data.batch_size`."
        )


@fits("fit_attention", data=attention_states)
def fit_attention(run: Run) -> None:
    """Fit aligners between the attention weights of two models' blocks, the heads as dimensions.

    Their errors are measured on held-out texts (Ren et al. 2023, Figures 4 and 5b).

    Example: `--data.model_x embedded:0 --data.model_y embedded:1 --run runs/attention`
    """
    fit_and_measure(run, "attention")


@fits("recover", data=target_states)
def recover(run: Run) -> None:
    """Pair a model's states with random invertible networks of them, fit maps, and measure what they recover.

    How well each finds the network is shown by strength of the non-linearity and by site (Ren et al. 2023, Table 3).

    Example: `--data.model embedded:0 --data.sites 2 --run runs/recovered`
    """
    fit_and_measure(run, "recovery")
