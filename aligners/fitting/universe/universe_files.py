"""Files of universes: read, taken apart into maps of pairs, and without a member."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
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
    own, count = [site for site, _ in bank.pairs[FORWARD]], len(bank.data["sites"])
    return [tuple(own[place::count]) for place in range(count)]


def universes_of(bank: StoredBank) -> dict[str, Universe]:
    """The trained universe of a file and its closed forms, by name, frozen."""
    universes = {}
    for name, maps in bank.maps[FORWARD].items():
        universe = Universe(maps, len(bank.data["models"]), bank.data.get("widths"))
        universes[name] = universe.requires_grad_(False).eval()
    return universes


def without_member(bank: StoredBank, model: str) -> StoredBank:
    """A universe that one of its models has left: the maps of all others are as they were.

    Args:
        bank: the universe.
        model: its name.

    Raises:
        ValueError: it is no member, or one of the last two.
    """
    names, count = [about["name"] for about in bank.data["models"]], len(bank.data["sites"])
    check_known(names, model=model)
    if len(names) < 3:
        raise UserError(
            f"Expected a universe of three or more models, of which one can leave, but got {names}."
        )
    left = names.index(model)
    places = [place for place in range(len(names) * count) if place // count != left]

    data, config = dict(bank.data), dict(bank.data_config)
    for options, name in ((data, "models"), (data, "widths"), (config, "models"), (config, "revisions")):  # fmt: skip
        if options.get(name) is not None:
            options[name] = _without(options[name], left)
    data["sites"] = [_without(sites, left) for sites in sites_of(bank)]
    config["sites"] = ",".join(":".join(map(str, sites)) for sites in data["sites"])

    maps = {}
    for name, bank_of_all in bank.maps[FORWARD].items():
        maps[name] = _maps_without(bank_of_all, left, places)
    return replace(
        bank,
        maps={FORWARD: maps},
        pairs={FORWARD: [bank.pairs[FORWARD][place] for place in places]},
        data=data,
        data_config=config,
        moments=None,
        training=records_at(bank.training, places),
    )


def _without(values: Sequence[Any], left: int) -> list[Any]:
    return [*values[:left], *values[left + 1 :]]


def _maps_without(maps: Aligner, left: int, places: list[int]) -> Aligner:
    """The maps of all models but one; `places` are those that stay."""
    if not isinstance(maps, SharedPart):
        return take_places(maps, places)
    return SharedPart.joined([maps.of_model(i) for i in range(len(maps.widths)) if i != left])


def pair_banks(bank: StoredBank) -> Iterator[tuple[int, int, StoredBank]]:
    """For each pair of models its numbers, and its maps as `train.py fit` keeps them, with the universe's data.

    The map from the first model into the second is u_j⁻¹ ∘ u_i; one that is bijective is its own way back.
    """
    universes, sites = universes_of(bank), sites_of(bank)
    count, widths = len(sites), universes[NETWORK].widths
    for p, (i, j) in enumerate(all_pairs(len(widths))):
        there: dict[str, Aligner] = {}
        back: dict[str, Aligner] = {}
        for name, universe in universes.items():
            there[name] = universe.map(i, j)
            if not there[name].bijective:
                back[name] = universe.map(j, i)
        moments = bank.moments
        if moments is not None:
            moments = cut(moments, slice(p * count, (p + 1) * count), widths[i], widths[j])
        pairs = [(of[i], of[j]) for of in sites]
        pair = replace(
            bank,
            command="fit",
            maps={FORWARD: there, BACKWARD: back},
            pairs={FORWARD: pairs, BACKWARD: pairs},
            moments=moments,
            training=records_at(bank.training, list(range(i * count, (i + 1) * count))),
        )
        yield i, j, pair
