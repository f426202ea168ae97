"""What a stitching run's checkpoint holds beyond Lightning's own, and how it is read without running its code."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from aligners.injection.routes import Route
from aligners.maps.affine import AffineLayer
from aligners.maps.base import Aligner
from aligners.maps.linear import Affine
from aligners.storage import (
    describe_aligner,
    load_alignment,
    read_checkpoint,
    refuse_other_component,
    refuse_other_models,
    restore_aligners,
)
from frozen.model import FrozenModel

__all__ = [
    "KEY",
    "StoredStitching",
    "describe_layers",
    "fitted_layers",
    "fitted_maps",
    "load_stitching",
    "refuse_other_layers",
]

logger = logging.getLogger(__name__)

KEY = "stitching"


def describe_layers(layers: Mapping[str, Aligner]) -> dict[str, Any]:
    """How to build each layer again, as plain values."""
    return {name: describe_aligner(layer) for name, layer in layers.items()}


@dataclass
class StoredStitching:
    """Everything a checkpoint says about a stitching run.

    Attributes:
        path: the file.
        layers: route key -> name -> trained bank, on the CPU.
        pairs: route key -> site pairs in the order of the banks.
        spread: route key -> mean (S, d_y) and variance (S,) of the target's states, where they were read.
        curves: points of the learning curves.
        loss: weights of the loss.
        data: `ModelTexts.describe()` of the run.
        data_config: the data module's options as they were given, enough to make it again.
    """

    path: Path
    layers: dict[str, dict[str, Aligner]]
    pairs: dict[str, list[tuple[int, int]]]
    spread: dict[str, dict[str, Tensor]]
    curves: list[dict[str, Any]]
    loss: dict[str, float]
    data: dict[str, Any]
    data_config: dict[str, Any]


def load_stitching(path: Path | str) -> StoredStitching:
    """Read a checkpoint that `train.py stitch` wrote. Only tensors and plain values are unpickled.

    Raises:
        ValueError: the file is not there, not readable, or not such a checkpoint.
    """
    return read_checkpoint(Path(path), "stitch", _stored)


def _stored(path: Path, content: Mapping[str, Any]) -> StoredStitching:
    """From what a checkpoint holds."""
    stored, state = content[KEY], content["state_dict"]
    layers = {key: restore_aligners(every, state, f"maps.{key}.") for key, every in stored["layers"].items()}
    pairs = {key: [(i, j) for i, j in each] for key, each in stored["pairs"].items()}
    others = {name: stored[name] for name in ("spread", "curves", "loss", "data", "data_config")}
    return StoredStitching(path, layers, pairs, **others)


def refuse_other_layers(stored: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Compare what a checkpoint trained with what a run that goes on from it trains.

    Args:
        stored: its layers and site pairs, by route.
        present: the run's.

    Raises:
        ValueError: routes, site pairs or layers differ.
    """
    for what, option in (("pairs", "`data.sites` and `model.routes`"), ("layers", "`model.layers`")):
        if stored[what] != present[what]:
            raise ValueError(
                f"The checkpoint was trained with {what} {stored[what]}, but this run has {present[what]}. To go on, "
                f"give the same {option}."
            )


def fitted_maps(
    path: Path | None, routes: Sequence[Route], models: Sequence[FrozenModel]
) -> dict[str, dict[str, Aligner]]:
    """Maps that `train.py fit` fitted on activations: route key -> name -> bank.

    They belong to the routes between the first two models: forward maps to the one, backward maps to the other.

    Raises:
        ValueError: they were fitted on other models, at other sites, or no route of the run has any.
    """
    if path is None:
        return {}
    stored = load_alignment(path)
    pair = [stored.data["models"][side] for side in "xy"]
    refuse_other_models(pair, [model.identity() for model in models[:2]], str(path))
    refuse_other_component(stored.data, routes[0].component, str(path))
    found: dict[str, dict[str, Aligner]] = {}
    for route in routes:
        direction = {"0_1": "forward", "1_0": "backward"}.get(route.key)
        if direction is None or not stored.maps[direction]:
            continue
        pairs = stored.site_pairs if direction == "forward" else [(j, i) for i, j in stored.site_pairs]
        if tuple(pairs) != route.pairs:
            raise ValueError(
                f"{path} was fitted at site pairs {stored.site_pairs}, but the route {route.name} has "
                f"{list(route.pairs)}. Set `data.sites` to those of the fit."
            )
        found[route.key] = stored.maps[direction]
    if not found:
        raise ValueError(
            f"{path} holds maps between the first two models, but no route of this run leads from one to the other. "
            "Choose other `routes`, or leave `fitted` out."
        )
    return found


def fitted_layers(
    path: Path | None, routes: Sequence[Route], models: Sequence[FrozenModel]
) -> dict[str, dict[str, Aligner]]:
    """Copies of fitted maps that can be trained on: a linear closed form goes on as an affine layer.

    Maps that neither have parameters nor are linear are left out, and that is said in the log.

    Raises:
        ValueError: as in `fitted_maps`.
    """
    if path is None:
        return {}
    moments = load_alignment(path).moments
    found: dict[str, dict[str, Aligner]] = {}
    for key, maps in fitted_maps(path, routes, models).items():
        found[key] = {}
        for name, aligner in maps.items():
            if not aligner.closed_form:
                found[key][f"{name}_stitched"] = copy.deepcopy(aligner).requires_grad_(True).train()
            elif isinstance(aligner, Affine):
                layer = AffineLayer(aligner.sites, aligner.d_x, aligner.d_y, start="linear")
                layer.adopt(aligner, moments if key == "0_1" else moments.swap())
                found[key][f"{name}_stitched"] = layer
            else:
                logger.warning("%s holds %s, which has nothing to train and is left out.", path, name)
    return found
