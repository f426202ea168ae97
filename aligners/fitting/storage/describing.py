"""How a bank of maps is described in plain values, and built again from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

import aligners
from aligners.errors import UserError
from aligners.maps.base import Aligner


def describe_aligner(aligner: Aligner) -> dict[str, Any]:
    """Class, sizes and options of an aligner as plain values: `build_aligner` makes an equal one."""
    return {
        "class": type(aligner).__name__,
        "sites": aligner.sites,
        "d_x": aligner.d_x,
        "d_y": aligner.d_y,
        "options": aligner.options(),
    }


def build_aligner(description: Mapping[str, Any]) -> Aligner:
    """An aligner as described, not yet fitted.

    Raises:
        ValueError: no aligner of that name is known here.
    """
    known = Aligner.registry
    name = description["class"]
    if name not in known and getattr(aligners, name, None) is None:  # which imports one of ours
        raise UserError(
            f"The checkpoint holds an aligner of class {name!r}, but only {', '.join(sorted(known))} are known. "
            "Import the module that defines it first."
        )
    with torch.random.fork_rng(devices=[]):
        return known[name](description["sites"], description["d_x"], description["d_y"], **description["options"])


def take_places(bank: Aligner, places: slice | list[int]) -> Aligner:
    """Some places of a bank as a bank of their own, frozen."""
    taken = build_aligner({**describe_aligner(bank), "sites": len(torch.arange(bank.sites)[places])})
    taken.load_state_dict({name: value[places] for name, value in bank.state_dict().items()})
    return taken.requires_grad_(False).eval()


def check_names(names: Iterable[str], argument: str) -> None:
    """Refuse names under which a module cannot hold aligners.

    Raises:
        ValueError: naming `argument` and them.
    """
    bad = [name for name in names if not name.replace("_", "").isalnum() or hasattr(nn.ModuleDict, name)]
    if bad:
        raise UserError(
            f"Expected the names in `{argument}` to be letters, digits and underscores, and not a name that PyTorch "
            f"keeps for itself, but got {', '.join(bad)}."
        )
