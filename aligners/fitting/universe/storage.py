"""The file of a universe, and those of the maps between each two of its models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from aligners.errors import UserError
from aligners.fitting.storage.bank import BACKWARD, FORWARD, StoredBank, load_bank
from aligners.fitting.universe.joint import all_pairs
from aligners.fitting.universe.universe import CLOSED_UNIVERSES, Universe, fit_network
from aligners.maps.base import Aligner
from aligners.similarity.algebra.moments import Moments


def load_universe(path: Path | str) -> StoredBank:
    """Read a file universe.ckpt, whose banks hold k · S places, model after model.

    Raises:
        ValueError: the file is not there, cannot be read, or is of something else.
    """
    bank = load_bank(path)
    if bank.command != "universe":
        raise UserError(f"Expected a universe.ckpt of `train.py universe`, but {path} is of `train.py {bank.command}`.")
    return bank


def universes_of(bank: StoredBank) -> dict[str, Universe]:
    """The trained universe of a file and its closed forms, by name, frozen."""
    models = len(bank.data["models"])
    found = {}
    for name, maps in bank.maps[FORWARD].items():
        _, fit_maps = CLOSED_UNIVERSES.get(name, (None, fit_network))
        found[name] = Universe(maps, models, fit_maps).requires_grad_(False).eval()
    return found


def pair_banks(bank: StoredBank) -> Iterator[tuple[int, int, StoredBank]]:
    """For each pair of models its numbers, and its maps as `train.py fit` keeps them, with the universe's data.

    The map from the first model into the second is u_j⁻¹ ∘ u_i; one that is bijective is its own way back.
    """
    universes, sites = universes_of(bank), bank.pairs[FORWARD][: len(bank.data["sites"])]
    for p, (i, j) in enumerate(all_pairs(len(bank.data["models"]))):
        there: dict[str, Aligner] = {name: universe.map(i, j) for name, universe in universes.items()}
        back: dict[str, Aligner] = {
            name: universe.map(j, i) for name, universe in universes.items() if not there[name].bijective
        }
        yield (
            i,
            j,
            replace(
                bank,
                command="fit",
                maps={FORWARD: there, BACKWARD: back},
                pairs={FORWARD: sites, BACKWARD: sites},
                moments=_of_pair(bank.moments, slice(p * len(sites), (p + 1) * len(sites))),
                training={key: _of_model(record, i, len(sites)) for key, record in bank.training.items()},
            ),
        )


def _of_pair(moments: Moments | None, places: slice) -> Moments | None:
    return None if moments is None else Moments(moments.n, *(part[places] for part in moments[1:]))


def _of_model(record: dict[str, Any], model: int, sites: int) -> dict[str, Any]:
    """The record of one model's places; what belongs to a site is the same for all models."""
    places = slice(model * sites, (model + 1) * sites)
    return {name: value[places] if isinstance(value, list) else value for name, value in record.items()}
