"""Training a bank that does not fit in memory in parts: ordinary runs of a few sites each, joined at the end."""

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
    moments = 3 * 8 * (d_x * d_x + d_y * d_y + d_x * d_y)  # the metric, its reset value, the result
    return moments + sum(_bytes(fit.aligner, rows) for fit in module.made(1, d_x, d_y))


def _bytes(aligner: Aligner, rows: int) -> int:
    weights = sum(weight.numel() for weight in aligner.parameters())
    fixed = sum(buffer.numel() for buffer in aligner.buffers())
    layers = [part.weight.shape[-2:] for part in aligner.modules() if isinstance(part, BankLinear)]
    activations = rows * sum(
        d_in + 3 * d_out for d_in, d_out in layers
    )  # what the backward pass needs
    return 4 * (COPIES * weights + 2 * fixed + activations * (2 if aligner.both_ways else 1))


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
    tries = sorted(folder.glob(f"part-{number}-*"), key=lambda path: int(path.name.split("-")[2]))

    def newest(*names: str) -> Path | None:
        return next(
            (path / name for path in reversed(tries) for name in names if (path / name).is_file()),
            None,
        )

    done = newest("aligners.safetensors", "aligners.ckpt")  # as the version before called it
    return folder / f"part-{number}-{len(tries) + 1}", done, newest("last.ckpt")


def check_part(file: Path, sites: str, module: Alignment, data: PairedActivations) -> None:
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
    fitted = {
        f"{route}.{name}": bank for route, maps in part.maps.items() for name, bank in maps.items()
    }
    planned = {fit.key: fit.aligner for fit in module.made(1, *data.reader.widths)}
    then, now = ({key: kind_of(bank) for key, bank in banks.items()} for banks in (fitted, planned))
    run = identity(data, aligners=now)
    known = {**part.data, "sites": run["data"]["sites"]}
    refuse_other_models(part.data["models"], run["data"]["models"], str(file))
    refuse_other_run(
        {"data": known, "data_config": part.data_config, "options": {"aligners": then}},
        run,
        str(file),
    )
    if part.data_config["sites"] != sites:
        raise UserError(
            f"{file} has the sites {part.data_config['sites']}, but this part of the run has {sites}. Give the "
            "`data.sites` and `sites_at_once` with which it was begun."
        )


def join_parts(files: Sequence[Path], folder: Path) -> StoredBank:
    """Join the sites of all parts, in their order, in one bank, and write it to `folder`/aligners.safetensors."""
    parts = [load_bank(file) for file in files]
    moments = [cast(Moments, part.moments) for part in parts]
    joined = replace(
        parts[0],
        maps={
            route: {name: join_banks([part.maps[route][name] for part in parts]) for name in maps}
            for route, maps in parts[0].maps.items()
        },
        pairs={
            route: [pair for part in parts for pair in part.pairs[route]]
            for route in parts[0].pairs
        },
        data={**parts[0].data, "sites": [pair for part in parts for pair in part.data["sites"]]},
        data_config={
            **parts[0].data_config,
            "sites": ",".join(part.data_config["sites"] for part in parts),
        },
        moments=Moments(
            moments[0].n,
            *(torch.cat(sums) for sums in zip(*(one[1:] for one in moments), strict=True)),
        ),
        training={
            key: join_records([part.training[key] for part in parts]) for key in parts[0].training
        },
        path=folder / "aligners.safetensors",
    )
    save_bank(joined, joined.path)
    return joined


def join_records(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join what training left: lists have an entry for each site, numbers are of the longest run."""
    return {
        name: [entry for record in each for entry in record[name]]
        if isinstance(value, list)
        else max(r[name] for r in each)
        for name, value in each[0].items()
    }
