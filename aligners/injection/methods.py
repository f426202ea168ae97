"""What is injected: the maps of the checkpoints, the closed forms, the floors, and in which direction."""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, count
from typing import Any, NamedTuple, Self, cast

from torch import Tensor, nn

from aligners.datamodules.rows.policies import RowKind
from aligners.datamodules.rows.row_types import SeenTypes
from aligners.errors import UserError
from aligners.fitting.alignment import Alignment
from aligners.fitting.fits import fit_map
from aligners.fitting.saved_bank import BACKWARD, FORWARD, StoredBank, refuse_other_bank
from aligners.fitting.training_status import CLOSED, how_fitted, outcomes
from aligners.injection.behaviour import OF_LABELS, OF_TOKENS, mapped_rows
from aligners.injection.routes import Route
from aligners.maps.affine import AffineLayer
from aligners.maps.base import Aligner
from aligners.maps.baselines import GaussianStates
from aligners.maps.canonical import CCA, PWCCA, SVCCA
from aligners.maps.linear import (
    Affine,
    Identity,
    Linear,
    Mean,
    Permutation,
    Procrustes,
    Ridge,
)
from aligners.models.model import FrozenModel
from aligners.progress import hidden, track
from aligners.similarity.algebra.moments import Moments

logger = logging.getLogger(__name__)
Maps = dict[str, dict[str, Aligner]]  # key of a route -> name -> map
KINDS: tuple[type[Aligner], ...] = (
    Linear,
    Ridge,
    Procrustes,
    Permutation,
    CCA,
    SVCCA,
    PWCCA,
)
CLOSED_FORMS = {kind.__name__.lower(): kind for kind in KINDS}
FLOORS = ("mean", "identity", "random_embedding")


class ClosedForms(Alignment):
    """An alignment of closed forms only, without those that the fitting rows do not determine.

    `route_methods` asks for them once more, and then says why they are not there.
    """

    def fit_moments(self, moments: Moments, validation: Moments | None) -> None:
        """Fit what can be fitted."""
        self.moments = moments
        for fit in track(self.fits(), "Solving", disable=hidden(self._trainer)):
            try:
                fit_map(fit.name, fit.aligner, *fit.moments(moments, validation))
            except ValueError:
                del cast(nn.ModuleDict, self.maps[fit.route])[fit.name]


class Method(NamedTuple):
    """A way to make a state for Y: `map` takes source rows (S, N, d) and the batch; `inverse` takes target rows."""

    name: str
    role: str
    map: Callable[[Tensor, Any], Tensor]
    inverse: Callable[[Tensor], Tensor] | None
    about: dict[str, Any]
    aligner: Aligner | None = None

    @classmethod
    def of(
        cls,
        name: str,
        role: str,
        aligner: Aligner,
        about: dict[str, Any],
        *,
        turned: bool = False,
    ) -> Self:
        """The method of an aligner, or of its inverse.

        Args:
            name: in the report.
            role: method, floor or ceiling.
            aligner: the map.
            about: what a report says of it.
            turned: whether its inverse is what maps.
        """
        there, back = (
            (aligner.inverse, aligner) if turned else (aligner, aligner.inverse)
        )
        inverse = back if aligner.invertible else None
        return cls(
            name,
            role,
            lambda rows, batch: mapped_rows(there, rows),
            inverse,
            about,
            aligner,
        )

    def outcome(self, site: int) -> str | None:
        """What came of its training at a site pair; None for what was not trained."""
        training = self.about.get("training")
        return None if training is None else training[site]


def route_methods(
    route: Route,
    stored: Sequence[StoredBank],
    closed_form: Sequence[str],
    validation: Moments | None = None,
) -> tuple[list[Method], dict[str, str]]:
    """The maps of one direction: closed forms that no checkpoint holds, then those of the checkpoints.

    Args:
        route: from X into Y, or from Y into X.
        stored: the checkpoints; closed forms are fitted on the moments of the first.
        closed_form: names out of `CLOSED_FORMS`.
        validation: moments of validation rows from X to Y, on which ridges choose their strength.

    Returns:
        The maps, and for each closed form that could not be fitted the reason.
    """
    first = next(bank for bank in stored if bank.moments is not None)
    moments = cast(Moments, first.moments)
    if route.key == BACKWARD:
        moments, validation = (
            moments.swap(),
            None if validation is None else validation.swap(),
        )
    held = _held_by(stored, route.key)
    methods, refusals = [], {}
    for name in closed_form:
        if name in held:
            continue
        aligner = CLOSED_FORMS[name](
            len(route.pairs), route.source.width, route.target.width
        )
        try:
            fit_map(name, aligner, moments, validation)
        except ValueError as error:
            refusals[name] = str(error)
        else:
            about = {
                **describe_map(aligner),
                "fitted_on": str(stored_kind(first)),
                "checkpoint": None,
            }
            methods.append(Method.of(name, "method", aligner, about))
    return [*methods, *held.values()], refusals


def _held_by(stored: Sequence[StoredBank], route: str) -> dict[str, Method]:
    """The maps of checkpoints that lead this way, or whose inverse does; a second one of a name becomes `name_2`."""
    methods: dict[str, Method] = {}
    for bank in stored:
        maps = {
            name: (aligner, route) for name, aligner in bank.maps.get(route, {}).items()
        }
        if route == BACKWARD:
            forward = bank.maps.get(FORWARD, {}).items()
            maps |= {
                name: (aligner, FORWARD)
                for name, aligner in forward
                if aligner.bijective
            }
        for name, (aligner, fitted) in maps.items():
            turned, taken = fitted != route, {*FLOORS, *OF_LABELS, *OF_TOKENS, *methods}
            free = next(
                n
                for n in chain([name], (f"{name}_{k}" for k in count(2)))
                if n not in taken
            )
            about = {
                **describe_map(aligner, turned),
                **({"fit": TASK_LOSS} if bank.command == "stitch" else {}),
                "fitted_on": str(stored_kind(bank)),
                "checkpoint": str(bank.path),
                "training": outcomes(
                    bank.training.get(f"{fitted}.{name}"), aligner.sites
                ),
            }
            methods[free] = Method.of(free, "method", aligner, about, turned=turned)
    return methods


def build_floors(route: Route, moments: Moments, seed: int) -> list[Method]:
    """What is measured beside the maps of a route, on one kind of rows: mean, identity, states drawn at random.

    Args:
        route: the maps.
        moments: of the fitting rows of that kind, in the route's direction.
        seed: of the random states.
    """
    sizes = len(moments.mean_x), route.source.width, route.target.width
    floors: dict[str, Aligner] = {"mean": Mean(*sizes)}
    if route.source.width == route.target.width:
        floors["identity"] = Identity(*sizes)
    for aligner in floors.values():
        aligner.fit(moments)
    gaussian = GaussianStates(moments, seed)

    def drawn(rows: Tensor, batch: Any) -> Tensor:
        return gaussian(batch.texts.text_numbers, batch.rows.counts, rows.device)

    about = {"class": "GaussianStates", "fit": CLOSED, "bijective": False}
    methods = [
        Method.of(name, "floor", aligner, describe_map(aligner))
        for name, aligner in floors.items()
    ]
    return [*methods, Method("random_embedding", "floor", drawn, None, about)]


def stored_kind(checkpoint: StoredBank) -> RowKind:
    """The rows that the maps of a checkpoint were fitted on."""
    return RowKind(checkpoint.data["rows"], checkpoint.data["special_tokens"])


def describe_map(aligner: Aligner, turned: bool = False) -> dict[str, Any]:
    """Class, options, findings, `parameters` of one site, and how it was fitted."""
    return {
        "class": type(aligner).__name__,
        "options": aligner.options(),
        **aligner.findings(),
        "parameters": sum(p.numel() for p in aligner.parameters()) // aligner.sites
        or None,
        "fit": how_fitted(aligner, turned=turned),
        "bijective": aligner.bijective,
    }


TASK_LOSS = "task loss"  # how stitching layers were fitted, as reports say it


OTHERS = (
    "models",
    "revisions",
    "masked_share",
    "sites",
)  # of `stitched_texts`, not of `pair_states`


def between_two_models(bank: StoredBank) -> StoredBank:
    """A finished run as one between two models, X and Y, whose tokens were mapped.

    Args:
        bank: of `train.py fit`, which is one, or of `train.py stitch`.

    Raises:
        ValueError: layers were trained between other than two models, or the file is a whole universe.
    """
    if bank.command == "fit":
        return bank
    if bank.command == "universe":
        raise UserError(
            f"Expected a checkpoint of two models, but {bank.path} holds a universe of "
            f"{len(bank.data['models'])}. Name one of the files pairs/X--Y/aligners.safetensors beside it."
        )
    config, models = bank.data_config, bank.data["models"]
    if len(models) != 2:
        raise UserError(
            f"Expected stitching layers between two models, but {bank.path} was trained on {len(models)}. Measure them "
            "with `evaluate.py stitch --checkpoint`."
        )
    rows = {
        "rows": "tokens",
        "special_tokens": True,
        "held_out_types": 0.0,
        "far_rows": "keep",
    }
    named = {
        f"model_{side}": name for side, name in zip("xy", config["models"], strict=True)
    }
    named |= {
        f"revision_{side}": name
        for side, name in zip("xy", config["revisions"] or [None] * 2, strict=True)
    }
    sites = {"sites": ",".join(f"{i}:{j}" for i, j in bank.pairs.get(FORWARD, []))}
    rest = {name: value for name, value in config.items() if name not in OTHERS}
    data = {**bank.data, **rows, "models": dict(zip("xy", models, strict=True))}
    return replace(bank, data=data, data_config={**rest, **named, **sites, **rows})


def seen_by_any(stored: Sequence[StoredBank], data: Any) -> SeenTypes:
    """The types that were among the fitting rows of at least one checkpoint.

    Args:
        stored: the checkpoints. Stitching layers, which are trained on whole texts, have seen the run's types if their
            texts are the run's.
        data: the data module of the run.

    Returns:
        The types, of no kind where they are not known of every checkpoint, or are not of one kind.
    """
    unknown, present = SeenTypes(None, frozenset()), data.config()
    decide = ("text", "rows", "special_tokens", "max_length")
    of_the_run = [
        all(bank.data_config[name] == present[name] for name in decide)
        for bank in stored
    ]
    types = [
        bank.seen or (data.seen if own else unknown)
        for bank, own in zip(stored, of_the_run, strict=True)
    ]
    kinds = {seen.kind for seen in types}
    return (
        unknown
        if len(kinds) > 1
        else SeenTypes(kinds.pop(), frozenset().union(*(seen.names for seen in types)))
    )


# ---------------------------------------------------------------------- maps of an earlier run in a stitching run


def fitted_maps(
    bank: StoredBank, routes: Sequence[Route], models: Sequence[FrozenModel]
) -> Maps:
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


def fitted_layers(
    bank: StoredBank, routes: Sequence[Route], models: Sequence[FrozenModel]
) -> Maps:
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
                layers[key][f"{name}_stitched"] = (
                    copy.deepcopy(aligner).requires_grad_(True).train()
                )
            elif isinstance(aligner, Affine):
                moments = cast(Moments, bank.moments)
                layer = AffineLayer(
                    aligner.sites, aligner.d_x, aligner.d_y, start="linear"
                )
                layer.adopt(aligner, moments if key == FORWARD else moments.swap())
                layers[key][f"{name}_stitched"] = layer
            else:
                logger.warning(
                    "%s holds %s, which has nothing to train and is left out.",
                    bank.path,
                    name,
                )
    return layers
