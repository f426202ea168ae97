"""Files of universes: read, taken apart into maps of pairs, and without a member."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from aligners.errors import UserError, check_known
from aligners.fitting.saved_bank import (
    BACKWARD,
    FORWARD,
    StoredBank,
    load_bank,
    records_at,
    take_places,
)
from aligners.fitting.universe.joint import all_pairs
from aligners.fitting.universe.shared_part import SharedPart, cut
from aligners.fitting.universe.universe import CLOSED_UNIVERSES, NETWORK, Universe, fit_network
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
    own, count = [site for site, _ in bank.pairs[FORWARD]], len(bank.data["sites"])
    return [tuple(own[place::count]) for place in range(count)]


def without_member(bank: StoredBank, model: str) -> StoredBank:
    """A universe that one of its models has left: the maps of all others are as they were.

    Args:
        bank: the universe.
        model: its name.

    Raises:
        ValueError: it is no member, or one of the last two.
    """
    names, sites = [about["name"] for about in bank.data["models"]], len(bank.data["sites"])
    check_known(names, model=model)
    if len(names) < 3:
        raise UserError(
            f"Expected a universe of three or more models, of which one can leave, but got {names}."
        )
    left = names.index(model)
    kept = [place for place in range(len(names) * sites) if place // sites != left]

    def others(values: Sequence[Any] | None) -> list[Any] | None:
        return None if values is None else [value for i, value in enumerate(values) if i != left]

    maps: dict[str, Aligner] = {}
    for name, universe in universes_of(bank).items():
        if isinstance(universe.maps, SharedPart):
            maps[name] = reduce(
                SharedPart.joined,
                others([universe.maps.of_model(i) for i in range(len(names))]) or [],
            )
        else:
            maps[name] = take_places(universe.maps, kept)
    data = bank.data | {name: others(bank.data.get(name)) for name in ("models", "widths")}
    config = bank.data_config | {
        name: others(bank.data_config.get(name)) for name in ("models", "revisions")
    }
    data["sites"] = list(map(others, sites_of(bank)))
    config["sites"] = ",".join(":".join(map(str, sites)) for sites in data["sites"])
    training = records_at(bank.training, kept)
    pairs = {FORWARD: [bank.pairs[FORWARD][place] for place in kept]}
    return replace(
        bank,
        maps={FORWARD: maps},
        pairs=pairs,
        data=data,
        data_config=config,
        moments=None,
        training=training,
    )


def universes_of(bank: StoredBank) -> dict[str, Universe]:
    """The trained universe of a file and its closed forms, by name, frozen."""
    models = len(bank.data["models"])
    universes = {}
    for name, maps in bank.maps[FORWARD].items():
        _, fit_maps = CLOSED_UNIVERSES.get(name, (None, fit_network))
        universe = Universe(maps, models, fit_maps, bank.data.get("widths"))
        universes[name] = universe.requires_grad_(False).eval()
    return universes


def pair_banks(bank: StoredBank) -> Iterator[tuple[int, int, StoredBank]]:
    """For each pair of models its numbers, and its maps as `train.py fit` keeps them, with the universe's data.

    The map from the first model into the second is u_j⁻¹ ∘ u_i; one that is bijective is its own way back.
    """
    universes, count = universes_of(bank), len(bank.data["sites"])
    sites = sites_of(bank)
    for p, (i, j) in enumerate(all_pairs(len(bank.data["models"]))):
        there: dict[str, Aligner] = {
            name: universe.map(i, j) for name, universe in universes.items()
        }
        widths = [universes[NETWORK].widths[m] for m in (i, j)]
        one_way = [name for name, aligner in there.items() if not aligner.bijective]
        pair = replace(
            bank,
            command="fit",
            maps={FORWARD: there, BACKWARD: {name: universes[name].map(j, i) for name in one_way}},
            pairs={route: [(of[i], of[j]) for of in sites] for route in (FORWARD, BACKWARD)},
            moments=bank.moments and cut(bank.moments, slice(p * count, (p + 1) * count), *widths),
            training=records_at(
                bank.training, list(range(i * count, (i + 1) * count))
            ),  # a site's, for all models
        )
        yield i, j, pair
