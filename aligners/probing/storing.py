"""Trained probes in a file."""

import json
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
from aligners.probing.probe_bank import Arm, Bank, ModelLayer, Probes
from aligners.probing.probes import DepthProbes, DistanceProbes, EdgeProbes

PROBES = "probes.safetensors"
ENTRY = "banks"
KINDS: dict[str, type[Probes]] = {
    kind.__name__: kind for kind in (EdgeProbes, DepthProbes, DistanceProbes)
}


def save_banks(path: Path, banks: Mapping[str, tuple[Bank, Mapping[str, Any]]]) -> None:
    """Write banks to a file, whole or not at all.

    Args:
        path: of the file.
        banks: by name, each with what else is known of it, as plain values.
    """
    described: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for number, (name, (bank, about)) in enumerate(banks.items()):
        described[name] = {
            "kind": type(bank.probes).__name__,
            "arms": bank.arms,
            "places": bank.places,
            "width": bank.probes.width,
            "options": bank.probes.options(),
            "about": about,
        }
        tensors |= {
            f"{number}/{key}": value.cpu().contiguous() for key, value in bank.state_dict().items()
        }
    with whole_file(path) as unfinished:
        save_sealed(save_file, tensors, unfinished, {ENTRY: json.dumps(described)})


def load_banks(path: Path | str) -> dict[str, tuple[Bank, dict[str, Any]]]:
    """Read banks, ready to be asked, and what is known of each.

    Args:
        path: the file, a folder of `evaluate.py share`, or the name of one on the Hub.

    Raises:
        ValueError: there is no such file, or it holds no banks; or as `shared_file`.
    """
    path = shared_file(path)
    if not path.is_file():
        raise UserError(
            f"Expected `probes` to be a {PROBES} of `train.py probe`, but there is no such file: {path}."
        )
    check_sealed(path)
    try:
        with safe_open(path, "pt") as file:
            described = json.loads(file.metadata()[ENTRY])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (no mapping)
    except Exception as error:  # reading any other file can raise anything
        raise UserError(
            f"Expected `probes` to be a {PROBES} of `train.py probe`, but {path} is not."
        ) from error
    for number, name in enumerate(described):
        own = [value for key, value in tensors.items() if key.startswith(f"{number}/")]
        if not all(bool(value.isfinite().all()) for value in own):
            raise UserError(
                f"Expected finite numbers in {path}, but the probes of {name} hold NaN or infinity."
            )
    numbered = enumerate(described.items())
    return {
        name: (_bank(entry, tensors, f"{number}/"), entry["about"])
        for number, (name, entry) in numbered
    }


def _bank(each: Mapping[str, Any], tensors: Mapping[str, Any], start: str) -> Bank:
    arms = [Arm(*arm) for arm in each["arms"]]
    bank = Bank(
        KINDS[each["kind"]](arms, each["width"], **each["options"]),
        [ModelLayer(*p) for p in each["places"]],
    )
    bank.load_state_dict(
        {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
    )
    return bank.eval().requires_grad_(False)
