"""Maps of an earlier run in a stitching run: measured as they are, or trained on."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from aligners.fitting.storage.bank import FORWARD, StoredBank, load_bank
from aligners.fitting.storage.refusals import refuse_other_component, refuse_other_models
from aligners.injection.routes import Route
from aligners.maps.affine import AffineLayer
from aligners.maps.base import Aligner
from aligners.maps.linear import Affine
from aligners.models.model import FrozenModel
from aligners.similarity.algebra.moments import Moments

__all__ = ["fitted_layers", "fitted_maps", "refuse_other_layers"]

logger = logging.getLogger(__name__)


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
    """The maps of a finished run, as they are: route key -> name -> bank.

    Maps that `train.py fit` fitted belong to the routes between the first two models.

    Raises:
        ValueError: they were fitted on other models, at other sites, or no route of the run has any.
    """
    return {} if path is None else _maps(load_bank(path), routes, models)


def _maps(bank: StoredBank, routes: Sequence[Route], models: Sequence[FrozenModel]) -> dict[str, dict[str, Aligner]]:
    refuse_other_models(
        bank.data["models"], [model.identity() for model in models[: len(bank.data["models"])]], str(bank.path)
    )
    refuse_other_component(bank.data, routes[0].component, str(bank.path))
    found = {route: bank.maps[route.key] for route in routes if bank.maps.get(route.key)}
    for route in found:
        if tuple(bank.pairs[route.key]) != route.pairs:
            raise ValueError(
                f"{bank.path} was fitted at site pairs {bank.pairs[route.key]}, but the route {route.name} has "
                f"{list(route.pairs)}. Set `data.sites` to those of the fit."
            )
    if not found:
        raise ValueError(
            f"{bank.path} holds maps between its first two models, but no route of this run leads from one to the "
            "other. Choose other `routes`, or leave `fitted` out."
        )
    return {route.key: maps for route, maps in found.items()}


def fitted_layers(
    path: Path | None, routes: Sequence[Route], models: Sequence[FrozenModel]
) -> dict[str, dict[str, Aligner]]:
    """Copies of a finished run's maps that can be trained on: a linear closed form goes on as an affine layer.

    Maps that neither have parameters nor are linear are left out, and that is said in the log.

    Raises:
        ValueError: as in `fitted_maps`.
    """
    if path is None:
        return {}
    bank = load_bank(path)
    found: dict[str, dict[str, Aligner]] = {}
    for key, maps in _maps(bank, routes, models).items():
        found[key] = {}
        for name, aligner in maps.items():
            if not aligner.closed_form:
                found[key][f"{name}_stitched"] = copy.deepcopy(aligner).requires_grad_(True).train()
            elif isinstance(aligner, Affine):
                moments = cast(Moments, bank.moments)
                layer = AffineLayer(aligner.sites, aligner.d_x, aligner.d_y, start="linear")
                layer.adopt(aligner, moments if key == FORWARD else moments.swap())
                found[key][f"{name}_stitched"] = layer
            else:
                logger.warning("%s holds %s, which has nothing to train and is left out.", path, name)
    return found
