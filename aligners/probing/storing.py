"""Saves trained probes to a file, and loads them."""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from aligners.errors import UserError
from aligners.files.atomic import whole_file
from aligners.files.sealed import check_sealed, save_sealed
from aligners.files.shared_folder import shared_file
from aligners.probing.probe_bank import Bank, ModelLayer, Probes, Variant

PROBES = "probes.safetensors"
ENTRY = "banks"

About = dict[str, Any]
State = dict[str, Tensor]


def probe_kinds() -> dict[str, type[Probes]]:
    """The classes of probes, by name."""
    # The import is here because it needs transformers, and this file is also read for maps.
    from aligners.probing.probes import DepthProbes, DistanceProbes, EdgeProbes

    kinds = (EdgeProbes, DepthProbes, DistanceProbes)
    return {kind.__name__: kind for kind in kinds}


def save_banks(path: Path, banks: Mapping[str, tuple[Bank, About]]) -> None:
    """Write banks to a file, whole or not at all.

    Args:
        path: path of the file.
        banks: banks by name, each with what else is known of it, as plain values.
    """
    described: About = {}
    tensors: State = {}
    for number, (name, (bank, about)) in enumerate(banks.items()):
        described[name] = {
            "kind": type(bank.probes).__name__,
            "arms": bank.variants,
            "places": bank.places,
            "width": bank.probes.width,
            "options": bank.probes.options(),
            "about": about,
        }
        for key, value in bank.state_dict().items():
            tensors[f"{number}/{key}"] = value.cpu().contiguous()

    metadata = {ENTRY: json.dumps(described)}
    with whole_file(path) as unfinished:
        save_sealed(save_file, tensors, unfinished, metadata)


def load_banks(path: Path | str) -> dict[str, tuple[Bank, About]]:
    """Load banks, ready to be applied, and what is known of each.

    Args:
        path: the file, a folder written by `evaluate.py share`, or the name of a repository on the Hub.

    Raises:
        ValueError: there is no such file, or it holds no banks or numbers that are not finite; or as `shared_file`
            does.
    """
    path = shared_file(path)
    described, states = _read(path)
    banks = {}
    for number, (name, entry) in enumerate(described.items()):
        state = states[str(number)]
        for value in state.values():
            if not value.isfinite().all():
                raise UserError(
                    f"Expected finite numbers in {path}, but the probes of {name} hold NaN or infinity."
                )
        banks[name] = _bank(entry, state), entry["about"]
    return banks


def _read(path: Path) -> tuple[About, dict[str, State]]:
    """Return the descriptions of the banks in a file, and the tensors of each bank, by its number."""
    expected = f"Expected `probes` to be a {PROBES} of `train.py probe`"
    if not path.is_file():
        raise UserError(f"{expected}, but there is no such file: {path}.")
    check_sealed(path)
    states = defaultdict[str, State](dict)
    try:
        with safe_open(path, "pt") as file:
            described = json.loads(file.metadata()[ENTRY])
            for key in file.keys():  # noqa: SIM118  (no mapping)
                number, _, name = key.partition("/")
                states[number][name] = file.get_tensor(key)
    except Exception as error:  # reading any other file can raise anything
        raise UserError(f"{expected}, but {path} is not.") from error
    return described, states


def _bank(entry: About, state: State) -> Bank:
    """Rebuild a bank as it was saved."""
    kind = probe_kinds()[entry["kind"]]
    variants = [Variant(*values) for values in entry["arms"]]
    places = [ModelLayer(*values) for values in entry["places"]]
    probes = kind(variants, entry["width"], **entry["options"])
    bank = Bank(probes, places)
    bank.load_state_dict(state)
    return bank.eval().requires_grad_(False)
