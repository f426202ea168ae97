"""Training a bank that does not fit in memory in parts: ordinary runs of a few sites each, joined at the end."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.run_identity import identity, refuse_other_run
from aligners.errors import UserError
from aligners.fitting.alignment import Alignment
from aligners.fitting.saved_bank import (
    StoredBank,
    join_banks,
    join_records,
    kind_of,
    load_bank,
    refuse_other_models,
    save_bank,
)
from aligners.maps.base import Aligner, BankLinear
from aligners.similarity.algebra.moments import Moments

COPIES = 5  # of a weight: itself, its gradient, Adam's two averages, the best so far
FILLED = 0.8  # share of the free memory that a plan uses


def bytes_a_site(module: Alignment, d_x: int, d_y: int, rows: int) -> int:
    """Estimate the bytes that training one site of all maps of a run takes.

    Args:
        module: the run's module, not set up yet; each of its aligners is built here for one site.
        d_x: width of X's states.
        d_y: width of Y's states.
        rows: most rows in a step.
    """
    total = (
        3 * 8 * (d_x * d_x + d_y * d_y + d_x * d_y)
    )  # moments: the sums, their reset, the result
    for fit in module.made(1, d_x, d_y):
        total += _bytes(fit.aligner, rows)
    return total


def _bytes(aligner: Aligner, rows: int) -> int:
    weights = sum(weight.numel() for weight in aligner.parameters())
    buffers = sum(buffer.numel() for buffer in aligner.buffers())
    activations = 0  # what the backward pass needs
    for part in aligner.modules():
        if isinstance(part, BankLinear):
            d_in, d_out = part.weight.shape[-2:]
            activations += rows * (d_in + 3 * d_out)
    if aligner.both_ways:
        activations *= 2
    return 4 * (COPIES * weights + 2 * buffers + activations)


def sites_at_once(sites: int, bytes_each: int, free: int) -> int:
    """How many sites of a bank fit in the free memory.

    Raises:
        ValueError: not even one site fits.
    """
    most = int(FILLED * free / bytes_each)
    if most < 1:
        raise UserError(
            f"Expected memory for at least one site, but training one takes about {bytes_each / 2**30:.1f} GiB and "
            f"{free / 2**30:.1f} GiB are free. Name fewer or smaller `aligners`, or a smaller `data.batch_size`."
        )
    return min(sites, most)


def pairs_within(limit: float, sites: int, bytes_each: int, model: int) -> int:
    """How many pairs of models a bank can hold, each with two models of its own at most.

    Args:
        limit: bytes that the bank and its models may take.
        sites: of a pair.
        bytes_each: what training one site takes.
        model: bytes of a model's weights.
    """
    return int(FILLED * limit / (sites * bytes_each + 2 * model))


def find_part(folder: Path, number: int) -> tuple[Path, Path | None, Path | None]:
    """A new folder for a part of a run, and its newest file of maps and last.ckpt, or None where there is none."""
    tries = sorted(
        folder.glob(f"part-{number}-*"), key=lambda path: int(path.name.split("-")[2])
    )
    done = resumable = None
    for path in tries:
        for name in (
            "aligners.ckpt",
            "aligners.safetensors",
        ):  # the first in earlier versions
            if (path / name).is_file():
                done = path / name
        if (path / "last.ckpt").is_file():
            resumable = path / "last.ckpt"
    return folder / f"part-{number}-{len(tries) + 1}", done, resumable


def check_part(
    file: Path, sites: str, module: Alignment, data: PairedActivations
) -> None:
    """Check that a finished part belongs to a run.

    Args:
        file: its aligners.safetensors.
        sites: the sites of this part of the run.
        module: the run's module, not set up yet.
        data: the run's data module.

    Raises:
        ValueError: it has other sites, models, data or maps.
    """
    part = load_bank(file)
    then = {}
    for route, maps in part.maps.items():
        for name, bank in maps.items():
            then[f"{route}.{name}"] = kind_of(bank)
    now = {fit.key: kind_of(fit.aligner) for fit in module.made(1, *data.reader.widths)}

    run = identity(data, aligners=now)
    refuse_other_models(part.data["models"], run["data"]["models"], str(file))
    stored = {
        "data": {**part.data, "sites": run["data"]["sites"]},  # compared below
        "data_config": part.data_config,
        "options": {"aligners": then},
    }
    refuse_other_run(stored, run, str(file))
    if part.data_config["sites"] != sites:
        raise UserError(
            f"{file} has the sites {part.data_config['sites']}, but this part of the run has {sites}. Give the "
            "`data.sites` and `sites_at_once` with which it was begun."
        )


def join_parts(files: Sequence[Path], folder: Path) -> StoredBank:
    """Join the sites of all parts, in their order, in one bank, and write it to `folder`/aligners.safetensors."""
    parts = [load_bank(file) for file in files]
    first = parts[0]
    joined = replace(
        first, path=folder / "aligners.safetensors", maps={}, pairs={}, training={}
    )
    joined.data = {**first.data, "sites": []}
    sites = []  # as they were typed
    for part in parts:
        for route, pairs in part.pairs.items():
            joined.pairs.setdefault(route, []).extend(pairs)
        joined.data["sites"] += part.data["sites"]
        sites.append(part.data_config["sites"])
    joined.data_config = {**first.data_config, "sites": ",".join(sites)}
    for route, maps in first.maps.items():
        joined.maps[route] = {}
        for name in maps:
            joined.maps[route][name] = join_banks(
                [part.maps[route][name] for part in parts]
            )
    for key in first.training:
        joined.training[key] = join_records([part.training[key] for part in parts])
    joined.moments = _join_moments([cast(Moments, part.moments) for part in parts])
    save_bank(joined, joined.path)
    return joined


def _join_moments(moments: Sequence[Moments]) -> Moments:
    sums = zip(*(one[1:] for one in moments), strict=True)
    return Moments(moments[0].n, *map(torch.cat, sums))
