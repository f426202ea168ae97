"""Reads checkpoints of Lightning: what runs go on from, and what finished runs wrote before they wrote safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "FORMAT", "STITCHING", "is_earlier", "read_earlier"]

ALIGNMENT, STITCHING = "alignment", "stitching"  # what each module adds to Lightning's checkpoints
# Of what they add. In the first, an epoch of moments was counted among those of training; up to the second, finished
# runs wrote such checkpoints too.
FORMAT = 3
ROUTES = {"forward": "0_1", "backward": "1_0"}

Described = tuple[dict[str, Any], dict[str, Tensor]]  # plain values and tensors, as a bank's file names them


def is_earlier(path: Path) -> bool:
    """Whether a file is something else than safetensors, which have a JSON object after eight bytes."""
    with path.open("rb") as file:
        return file.read(9)[8:] != b"{"


def read_earlier(path: Path) -> Described:
    """What a bank's file would hold. Only tensors and plain values are unpickled.

    Raises:
        ValueError: the file is of something else.
    """
    content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, Mapping) or not {ALIGNMENT, STITCHING} & set(content):
        raise ValueError("it holds no maps")
    describe = _alignment if ALIGNMENT in content else _stitching
    described, tensors = describe(content)
    described["unfinished"] = described["unfinished"] or path.name == "last.ckpt"
    return described, tensors


def _alignment(content: Mapping[str, Any]) -> Described:
    stored, state = content[ALIGNMENT], content["state_dict"]
    maps = {ROUTES[direction]: each for direction, each in stored["aligners"].items()}
    sites = stored["data"]["sites"]
    described = {
        "command": "fit",
        "maps": maps,
        "pairs": {"0_1": sites, "1_0": [[j, i] for i, j in sites]},
        "data": stored["data"],
        "data_config": {"held_out_types": 0.0, **stored["data_config"]},  # earlier fits left none out
        "training": {_by_route(key): record for key, record in stored.get("training", {}).items()},
        "seen": stored.get("seen"),
        "unfinished": stored.get("format", 1) >= FORMAT,
    }
    tensors = {f"moments/{name}": value for name, value in stored["moments"].items()}
    for direction, route in ROUTES.items():
        tensors |= _state(state, f"{direction}_maps", route, maps[route])
    return described, tensors


def _by_route(key: str) -> str:
    direction, name = key.split(".")
    return f"{ROUTES[direction]}.{name}"


def _stitching(content: Mapping[str, Any]) -> Described:
    stored, state = content[STITCHING], content["state_dict"]
    plain = {name: stored[name] for name in ("pairs", "data", "data_config", "curves", "loss")}
    described = {"command": "stitch", "maps": stored["layers"], "seen": None, **plain}
    described["unfinished"] = stored.get("format", 1) >= FORMAT
    tensors = {f"spread/{route}/{name}": v for route, each in stored["spread"].items() for name, v in each.items()}
    for route, maps in stored["layers"].items():
        tensors |= _state(state, f"maps.{route}", route, maps)
    return described, tensors


def _state(state: Mapping[str, Tensor], prefix: str, route: str, names: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state of the banks of a route, under the names of a bank's file."""
    found: dict[str, Tensor] = {}
    for name in names:
        own = f"{prefix}.{name}."
        found |= {f"maps/{route}/{name}/{k.removeprefix(own)}": v for k, v in state.items() if k.startswith(own)}
    return found
