"""Files of universes: read, and taken apart into maps of pairs."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from aligners.errors import UserError
from aligners.fitting.saved_bank import (
    BACKWARD,
    FORWARD,
    StoredBank,
    load_bank,
    records_at,
)
from aligners.fitting.universe.joint import all_pairs
from aligners.fitting.universe.shared_part import cut
from aligners.fitting.universe.universe import NETWORK, Universe
from aligners.maps.base import Aligner


def load_universe(path: Path | str) -> StoredBank:
    """Read a file universe.safetensors, whose banks hold k · S places, model after model.

    Raises:
        ValueError: the file is not there, cannot be read, or is of something else.
    """
    bank = load_bank(path)
    if bank.command != "universe":
        raise UserError(
            f"Expected a file of `train.py universe`, but {path} is of `train.py {bank.command}`."
        )
    return bank


def sites_of(bank: StoredBank) -> list[tuple[int, ...]]:
    """For each place of a universe's space the site of every model."""
    own = [site for site, _ in bank.pairs[FORWARD]]
    count = len(bank.data["sites"])
    return [tuple(own[place::count]) for place in range(count)]


def universes_of(bank: StoredBank) -> dict[str, Universe]:
    """The trained universe of a file and its closed forms, by name, frozen."""
    universes = {}
    for name, maps in bank.maps[FORWARD].items():
        universe = Universe(maps, len(bank.data["models"]), bank.data.get("widths"))
        universes[name] = universe.requires_grad_(False).eval()
    return universes


def pair_banks(bank: StoredBank) -> Iterator[tuple[int, int, StoredBank]]:
    """For each pair of models its numbers, and its maps as `train.py fit` keeps them, with the universe's data.

    The map from the first model into the second is u_j⁻¹ ∘ u_i; one that is bijective is its own way back.
    """
    universes = universes_of(bank)
    sites = sites_of(bank)
    count = len(sites)
    widths = universes[NETWORK].widths
    for p, (i, j) in enumerate(all_pairs(len(widths))):
        moments = bank.moments
        if moments is not None:
            moments = cut(
                moments, slice(p * count, (p + 1) * count), widths[i], widths[j]
            )
        pairs = [(of[i], of[j]) for of in sites]
        pair = replace(
            bank,
            command="fit",
            maps=_maps_between(universes, i, j),
            pairs={FORWARD: pairs, BACKWARD: pairs},
            moments=moments,
            training=records_at(bank.training, list(range(i * count, (i + 1) * count))),
        )
        yield i, j, pair


def _maps_between(
    universes: dict[str, Universe], i: int, j: int
) -> dict[str, dict[str, Aligner]]:
    """The maps from model i into j, and back where a map is no bijection: route -> name -> map."""
    maps: dict[str, dict[str, Aligner]] = {FORWARD: {}, BACKWARD: {}}
    for name, universe in universes.items():
        maps[FORWARD][name] = universe.map(i, j)
        if not maps[FORWARD][name].bijective:
            maps[BACKWARD][name] = universe.map(j, i)
    return maps
