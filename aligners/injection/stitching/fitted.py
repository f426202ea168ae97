"""Maps of an earlier run in a stitching run: measured as they are, or trained on."""

import copy
import logging
from collections.abc import Sequence
from typing import cast

from aligners.errors import UserError
from aligners.fitting.bank import FORWARD, StoredBank, refuse_other_bank
from aligners.injection.routes import Route
from aligners.maps.affine import AffineLayer
from aligners.maps.base import Aligner
from aligners.maps.linear import Affine
from aligners.models.model import FrozenModel
from aligners.similarity.algebra.moments import Moments

logger = logging.getLogger(__name__)
Maps = dict[str, dict[str, Aligner]]  # key of a route -> name -> map


def fitted_maps(bank: StoredBank, routes: Sequence[Route], models: Sequence[FrozenModel]) -> Maps:
    """The maps of a finished run on the routes of this one, as they are: route key -> name -> bank.

    Maps that `train.py fit` fitted belong to the routes between the first two models.

    Raises:
        ValueError: they were fitted on other models, at other sites, or no route of the run has any.
    """
    known = [model.identity() for model in models[: len(bank.data["models"])]]
    pairs = {route.key: route.pairs for route in routes if bank.maps.get(route.key)}
    refuse_other_bank(bank, known, routes[0].component, pairs)
    if not pairs:
        raise UserError(
            f"{bank.path} holds maps between its first two models, but no route of this run leads from one to the "
            "other. Choose other `routes`, or leave `fitted` out."
        )
    return {key: bank.maps[key] for key in pairs}


def fitted_layers(bank: StoredBank, routes: Sequence[Route], models: Sequence[FrozenModel]) -> Maps:
    """Copies of a finished run's maps that can be trained on: a linear closed form goes on as an affine layer.

    Maps that neither have parameters nor are linear are left out, and that is said in the log.

    Raises:
        ValueError: as in `fitted_maps`.
    """
    layers: Maps = {}
    for key, maps in fitted_maps(bank, routes, models).items():
        layers[key] = {}
        for name, aligner in maps.items():
            if not aligner.closed_form:
                layers[key][f"{name}_stitched"] = copy.deepcopy(aligner).requires_grad_(True).train()
            elif isinstance(aligner, Affine):
                moments = cast(Moments, bank.moments)
                layer = AffineLayer(aligner.sites, aligner.d_x, aligner.d_y, start="linear")
                layer.adopt(aligner, moments if key == FORWARD else moments.swap())
                layers[key][f"{name}_stitched"] = layer
            else:
                logger.warning("%s holds %s, which has nothing to train and is left out.", bank.path, name)
    return layers
