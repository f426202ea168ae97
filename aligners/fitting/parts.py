"""Training in parts, for a bank that does not fit in memory: runs of a few sites each, joined at the end."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

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
from aligners.maps.base import Aligner
from aligners.maps.by_rows.drawn_rows import bytes_of_rows, rows_needed
from aligners.similarity.algebra.moments import Moments

Maps = dict[str, dict[str, Aligner]]  # route -> name -> bank
# Copies of a weight: the last and its average, its gradient, Adam's two averages, the best so far.
COPIES = 6
FILLED = 0.8  # share of the free memory that a plan uses


def bytes_a_site(
    module: Alignment, d_x: int, d_y: int, rows: int, *, on_gpu: bool = False
) -> int:
    """Estimate the bytes that training one site of all maps of a run takes.

    Args:
        module: the run's module, not set up yet; each of its aligners is built here for one site.
        d_x: width of X's states.
        d_y: width of Y's states.
        rows: most rows in a step.
        on_gpu: whether steps may be recorded as CUDA graphs. These hold their activations, and the gradients before
            they are copied to where the optimizer finds them, for as long as they are replayed.
    """
    products = d_x * d_x + d_y * d_y + d_x * d_y
    total = 3 * 8 * products  # moments: the sums, their reset, the result
    maps = []
    for fit in module.made(1, d_x, d_y):
        total += _bytes(fit.aligner, rows, held=on_gpu and module.graphs)
        maps.append(fit.aligner)
    for to_choose in (False, True):
        needed = rows_needed(maps, to_choose=to_choose)
        total += bytes_of_rows(needed, 1, d_x + d_y)
    return total


def _bytes(aligner: Aligner, rows: int, *, held: bool) -> int:
    weights = sum(map(torch.numel, aligner.parameters()))
    buffers = sum(map(torch.numel, aligner.buffers()))
    activations = rows * aligner.kept_floats()
    # Once the gradients are there, the activations are gone, unless a graph holds both, and clipping copies at most all
    # gradients.
    passing = max(activations, weights)
    if held:
        passing = activations + 2 * weights
    return 4 * (COPIES * weights + 2 * buffers + passing)


def sites_at_once(sites: int, bytes_each: int, free: int) -> int:
    """Return how many sites of a bank fit in the free memory.

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
    """Return how many pairs of models a bank can hold, if each pair has at most two models of its own.

    Args:
        limit: bytes that the bank and its models may take.
        sites: number of sites of a pair.
        bytes_each: what training one site takes.
        model: bytes of a model's weights.
    """
    return int(FILLED * limit / (sites * bytes_each + 2 * model))


def find_part(folder: Path, number: int) -> tuple[Path, Path | None, Path | None]:
    """Return a new folder for a part of a run, and its newest file of maps and last.ckpt, or None."""
    found = folder.glob(f"part-{number}-*")
    tries = sorted(found, key=lambda path: int(path.name.split("-")[2]))
    done = resumable = None
    for path in tries:
        # the first name is that of earlier versions
        for name in ("aligners.ckpt", "aligners.safetensors"):
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
        file: aligners.safetensors of the part.
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
    now = {}
    for fit in module.made(1, *data.reader.widths):
        now[fit.key] = kind_of(fit.aligner)

    run = identity(data, aligners=now)
    refuse_other_models(part.data["models"], run["data"]["models"], str(file))
    stored = {
        "data": {**part.data, "sites": run["data"]["sites"]},  # compared below
        "data_config": part.data_config,
        "options": {"aligners": then},
    }
    refuse_other_run(stored, run, str(file))
    before = part.data_config["sites"]
    if before != sites:
        raise UserError(
            f"{file} has the sites {before}, but this part of the run has {sites}. Use the `data.sites` and "
            "`sites_at_once` that it was begun with."
        )


def join_parts(files: Sequence[Path], folder: Path) -> StoredBank:
    """Join the sites of all parts, in their order, into one bank, and write it to `folder`/aligners.safetensors."""
    parts = [load_bank(file) for file in files]
    first = parts[0]
    pairs: dict[str, list[tuple[int, int]]] = {}
    sites = []
    typed = []  # the sites as the user wrote them
    for part in parts:
        for route, of_route in part.pairs.items():
            pairs.setdefault(route, []).extend(of_route)
        sites += part.data["sites"]
        typed.append(part.data_config["sites"])
    all_typed = ",".join(typed)

    joined = replace(
        first,
        path=folder / "aligners.safetensors",
        maps=_join_maps(parts),
        pairs=pairs,
        data={**first.data, "sites": sites},
        data_config={**first.data_config, "sites": all_typed},
        moments=_join_moments(parts),
        training=_join_training(parts),
    )
    save_bank(joined, joined.path)
    return joined


def _join_maps(parts: Sequence[StoredBank]) -> Maps:
    """Return banks of all sites: route -> name -> bank."""
    joined: Maps = {}
    for route, maps in parts[0].maps.items():
        joined[route] = {}
        for name in maps:
            banks = [part.maps[route][name] for part in parts]
            joined[route][name] = join_banks(banks)
    return joined


def _join_training(parts: Sequence[StoredBank]) -> dict[str, dict[str, Any]]:
    """Return the records of training at all sites: route.name -> record."""
    joined = {}
    for key in parts[0].training:
        records = [part.training[key] for part in parts]
        joined[key] = join_records(records)
    return joined


def _join_moments(parts: Sequence[StoredBank]) -> Moments:
    each = [cast(Moments, part.moments) for part in parts]
    n = each[0].n
    sums = zip(*[moments[1:] for moments in each], strict=True)
    return Moments(n, *map(torch.cat, sums))
