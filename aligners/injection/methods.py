"""What is injected: the maps of checkpoints, the closed forms, the floors, and in which direction."""

import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self, cast

from torch import Tensor, nn

from aligners.datamodules.rows.policies import RowKind
from aligners.datamodules.rows.row_types import SeenTypes
from aligners.errors import UserError
from aligners.fitting.alignment import Alignment
from aligners.fitting.fits import AlignerFactory, fit_map
from aligners.fitting.map_errors import parameters_of
from aligners.fitting.saved_bank import BACKWARD, FORWARD, StoredBank, refuse_other_bank
from aligners.fitting.training_status import CLOSED, how_fitted, outcomes
from aligners.injection.behaviour import OF_LABELS, OF_TOKENS, mapped_rows
from aligners.injection.routes import Route
from aligners.maps.affine import AffineLayer
from aligners.maps.base import Aligner
from aligners.maps.baselines import GaussianStates
from aligners.maps.by_rows.drawn_rows import KeptRows
from aligners.maps.by_rows.kept_rows import ByRows
from aligners.maps.by_rows.kernel_ridge import KernelRidge
from aligners.maps.by_rows.nearest_neighbours import NearestNeighbours
from aligners.maps.by_rows.relative import Relative
from aligners.maps.canonical import CCA, PWCCA, SVCCA
from aligners.maps.from_moments.reduced_rank import ReducedRank
from aligners.maps.from_moments.soft_matching import SoftMatching
from aligners.maps.linear import (
    Affine,
    Identity,
    Linear,
    Mean,
    Permutation,
    Procrustes,
    Ridge,
)
from aligners.maps.shared_solutions import SharedMoments
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
# those that options may also name; where they name none, the ones above are fitted
KNOWN_CLOSED_FORMS: dict[str, type[Aligner]] = {
    **CLOSED_FORMS,
    "reduced_rank": ReducedRank,
    "soft_matching": SoftMatching,
}
# those that need rows of the fit besides
BY_ROWS: dict[str, Callable[[int, int, int], ByRows]] = {
    "nearest_neighbours": NearestNeighbours,
    "kernel_ridge": KernelRidge,
    "relative": Relative,
}
ALL_CLOSED_FORMS: dict[str, AlignerFactory] = {**KNOWN_CLOSED_FORMS, **BY_ROWS}
FLOORS = ("mean", "identity", "random_embedding")
TASK_LOSS = "task loss"  # value of the column `fit` for stitching layers
OF_STITCHING = (
    "models",
    "revisions",
    "masked_share",
    "sites",
)  # options of `stitched_texts` that `pair_states` lacks
OF_TEXTS = (
    "text",
    "rows",
    "special_tokens",
    "max_length",
)  # options that determine the types of rows


class ClosedForms(Alignment):
    """An alignment of closed forms that leaves out those that the fitting rows do not determine.

    `route_methods` tries these again, and reports why they are missing.
    """

    def fit_moments(self, moments: Moments, validation: Moments | None) -> None:
        """Fit the closed forms that the rows determine."""
        self.moments = moments
        shared = SharedMoments.of(moments)
        for fit in track(self.fits(), "Solving", disable=hidden(self._trainer)):
            try:
                self.fit_one(fit, shared, validation)
            except ValueError:
                del cast(nn.ModuleDict, self.maps[fit.route])[fit.name]


class Method(NamedTuple):
    """A way to make states for Y.

    Attributes:
        name: name in the report.
        role: method, floor or ceiling.
        map: maps source rows (S, N, d_x), given the batch that they come from, to target rows (S, N, d_y).
        inverse: maps target rows to source rows; None: there is no inverse.
        about: what a report says of it.
        aligner: the map, if it is one.
    """

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
        """Make the method of an aligner; if `turned`, that of its inverse."""
        there: Callable[[Tensor], Tensor] = aligner
        back: Callable[[Tensor], Tensor] = aligner.inverse
        if turned:
            there, back = back, there

        def mapped(rows: Tensor, batch: Any) -> Tensor:
            return mapped_rows(there, rows)

        inverse = None
        if aligner.invertible:
            inverse = back
        return cls(name, role, mapped, inverse, about, aligner)

    def outcome(self, site: int) -> str | None:
        """Return how its training ended at a site pair; None if it was not trained."""
        training = self.about.get("training")
        if training is None:
            return None
        return training[site]


def first_moments(stored: Sequence[StoredBank]) -> tuple[RowKind, Moments]:
    """Return the moments of the fitting rows from the first checkpoint that holds them, and the kind of these rows.

    Raises:
        ValueError: no checkpoint holds moments.
    """
    for bank in stored:
        if bank.moments is not None:
            return stored_kind(bank), bank.moments
    raise UserError(
        "Expected a checkpoint of `train.py fit` among those that are measured, as floors need the moments of its "
        "fitting rows, but got none."
    )


def route_methods(
    route: Route,
    stored: Sequence[StoredBank],
    closed_form: Sequence[str],
    validation: Moments | None = None,
    shared: SharedMoments | None = None,
    kept: KeptRows | None = None,
) -> tuple[list[Method], dict[str, str]]:
    """Return the maps of one direction: closed forms that no checkpoint holds, then those of the checkpoints.

    Args:
        route: a route from X into Y, or from Y into X.
        stored: checkpoints; closed forms are fitted to the moments of the first.
        closed_form: names out of `ALL_CLOSED_FORMS`.
        validation: moments of validation rows from X to Y, which choose the strength of ridges.
        shared: moments of the first checkpoint that holds any, on the device where closed forms are solved and stay,
            and with what other routes have decomposed; default: those moments as they are.
        kept: rows from X to Y, for the closed forms that keep any.

    Returns:
        The maps, and for each closed form that could not be fitted the reason.
    """
    held = _held_by(stored, route.key)
    lacking = [name for name in closed_form if name not in held]
    kind, moments = first_moments(stored)
    if shared is None:
        shared = SharedMoments.of(moments)
    kept = kept or KeptRows()
    solved, refusals = _solved(route, str(kind), shared, lacking, validation, kept)
    return [*solved, *held.values()], refusals


def _solved(
    route: Route,
    kind: str,
    moments: SharedMoments,
    closed_form: Sequence[str],
    validation: Moments | None,
    kept: KeptRows,
) -> tuple[list[Method], dict[str, str]]:
    """Return closed forms, solved from moments of a kind of rows from X to Y, and why others could not be fitted."""
    device = moments.n.device
    if validation is not None:
        validation = validation.to(device)
    if route.key == BACKWARD:
        moments = moments.swap()
        if validation is not None:
            validation = validation.swap()
    methods, refusals = [], {}
    for name in closed_form:
        aligner = ALL_CLOSED_FORMS[name](*route.sizes).to(device)
        rows = kept.arguments(aligner, backward=route.key == BACKWARD)
        try:
            fit_map(name, aligner, moments, validation, **rows)
        except ValueError as error:
            refusals[name] = str(error)
            continue
        about = describe_map(aligner)
        about |= {"fitted_on": kind, "checkpoint": None}
        methods.append(Method.of(name, "method", aligner, about))
    return methods, refusals


def _held_by(stored: Sequence[StoredBank], route: str) -> dict[str, Method]:
    """Return the checkpoints' maps in the direction of a route; the second map of a name is called `name_2`."""
    methods: dict[str, Method] = {}
    for bank in stored:
        for name, (aligner, fitted) in _leading(bank, route).items():
            turned = fitted != route
            about = describe_map(aligner, turned)
            if bank.command == "stitch":
                about["fit"] = TASK_LOSS
            about["fitted_on"] = str(stored_kind(bank))
            about["checkpoint"] = str(bank.path)
            record = bank.training.get(f"{fitted}.{name}")
            about["training"] = outcomes(record, aligner.sites)
            free = _free_name(name, {*FLOORS, *OF_LABELS, *OF_TOKENS, *methods})
            method = Method.of(free, "method", aligner, about, turned=turned)
            methods[free] = method
    return methods


def _leading(bank: StoredBank, route: str) -> dict[str, tuple[Aligner, str]]:
    """Return the maps that lead this way, or whose inverse does: name -> map and the route that it was fitted on."""
    maps = {}
    for name, aligner in bank.maps.get(route, {}).items():
        maps[name] = aligner, route
    if route == BACKWARD:
        for name, aligner in bank.maps.get(FORWARD, {}).items():
            if aligner.bijective:
                maps[name] = aligner, FORWARD
    return maps


def _free_name(name: str, taken: Collection[str]) -> str:
    """Return the name if it is free, or else with the first number that makes it so: `name_2`."""
    free = name
    number = 2
    while free in taken:
        free = f"{name}_{number}"
        number += 1
    return free


def build_floors(route: Route, moments: Moments, seed: int) -> list[Method]:
    """Build the floors of a route on one kind of rows: mean, identity (for equal widths), and random states.

    Args:
        route: the route from X into Y.
        moments: moments of the fitting rows of that kind, in the route's direction.
        seed: seed of the random states.
    """
    floors: dict[str, Aligner] = {"mean": Mean(*route.sizes)}
    if route.source.width == route.target.width:
        floors["identity"] = Identity(*route.sizes)
    methods = []
    for name, aligner in floors.items():
        aligner.fit(moments)
        methods.append(Method.of(name, "floor", aligner, describe_map(aligner)))
    gaussian = GaussianStates(moments, seed)

    def drawn(rows: Tensor, batch: Any) -> Tensor:
        return gaussian(batch.texts.text_numbers, batch.rows.counts, rows.device)

    about = {"class": "GaussianStates", "fit": CLOSED, "bijective": False}
    return [*methods, Method("random_embedding", "floor", drawn, None, about)]


def stored_kind(bank: StoredBank) -> RowKind:
    """Return the kind of rows that the maps of a checkpoint were fitted on."""
    return RowKind(bank.data["rows"], bank.data["special_tokens"])


def describe_map(aligner: Aligner, turned: bool = False) -> dict[str, Any]:
    """Describe a map: class, options, findings, `parameters` of one site, fit; `turned`: its inverse is used."""
    return {
        "class": type(aligner).__name__,
        "options": aligner.options(),
        **aligner.findings(),
        "parameters": parameters_of(aligner) or None,
        "fit": how_fitted(aligner, turned=turned),
        "bijective": aligner.bijective,
    }


# ---------------------------------------------------------------------- checkpoints as an injection needs them


def between_two_models(bank: StoredBank) -> StoredBank:
    """Return a finished run as one between two models, X and Y, whose tokens were mapped.

    Args:
        bank: bank of `train.py fit`, which is returned as it is, or of `train.py stitch`.

    Raises:
        ValueError: layers were trained between more or fewer than two models, or the file is a whole universe.
    """
    if bank.command == "fit":
        return bank
    models = bank.data["models"]
    if bank.command == "universe":
        raise UserError(
            f"Expected a checkpoint of two models, but {bank.path} holds a universe of "
            f"{len(models)}. Name one of the files pairs/X--Y/aligners.safetensors beside it."
        )
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
    sides = dict(zip("xy", models, strict=True))
    data = {**bank.data, **rows, "models": sides}
    config = {**_config_of_two(bank), **rows}
    return replace(bank, data=data, data_config=config)


def _config_of_two(bank: StoredBank) -> dict[str, Any]:
    """Split the options of stitching layers into those of `pair_states` that name models and sites, and all others."""
    config = dict(bank.data_config)
    names = config["models"]
    revisions = config["revisions"] or [None] * len(names)
    for option in OF_STITCHING:
        config.pop(option, None)
    config["model_x"], config["model_y"] = names
    config["revision_x"], config["revision_y"] = revisions
    pairs = [f"{i}:{j}" for i, j in bank.pairs.get(FORWARD, [])]
    config["sites"] = ",".join(pairs)
    return config


def seen_by_any(stored: Sequence[StoredBank], data: Any) -> SeenTypes:
    """Return the types that were among the fitting rows of at least one checkpoint.

    Args:
        stored: checkpoints. Stitching layers, which are trained on whole texts, have seen the run's types if their
            texts are the run's.
        data: the data module of the run.

    Returns:
        The types; their kind is None if the types of a checkpoint are unknown or of another kind.
    """
    unknown = SeenTypes(None, frozenset())
    present = data.config()
    kinds = set()
    names: set[str] = set()
    for bank in stored:
        seen = bank.seen
        if seen is None:
            seen = data.seen if _same_texts(bank.data_config, present) else unknown
        kinds.add(seen.kind)
        names |= seen.names
    if len(kinds) > 1:
        return unknown
    return SeenTypes(kinds.pop(), frozenset(names))


def _same_texts(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Tell whether two data modules make the same rows of the same texts, judging by their options."""
    return [then[name] for name in OF_TEXTS] == [now[name] for name in OF_TEXTS]


# ---------------------------------------------------------------------- maps of an earlier run in a stitching run


def fitted_maps(
    bank: StoredBank, routes: Sequence[Route], models: Sequence[FrozenModel]
) -> Maps:
    """Return the maps of a finished run on the routes of this one, unchanged: route key -> name -> bank.

    Maps of `train.py fit` belong to the routes between the first two models.

    Raises:
        ValueError: they were fitted on other models or at other sites, or no route of the run has any.
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
    """Return trainable copies of a finished run's maps, named `name_stitched`; see `_trainable`.

    Raises:
        ValueError: as in `fitted_maps`.
    """
    layers: Maps = {}
    for key, maps in fitted_maps(bank, routes, models).items():
        layers[key] = {}
        for name, aligner in maps.items():
            layer = _trainable(aligner, bank, key)
            if layer is not None:
                layers[key][f"{name}_stitched"] = layer
                continue
            logger.warning(
                "%s holds %s, which has nothing to train and is left out.",
                bank.path,
                name,
            )
    return layers


def _trainable(aligner: Aligner, bank: StoredBank, route: str) -> Aligner | None:
    """Return a copy to train on: an affine layer for a linear closed form; None for another closed form."""
    if not aligner.closed_form:
        return copy.deepcopy(aligner).requires_grad_(True).train()
    if not isinstance(aligner, Affine):
        return None
    moments = cast(Moments, bank.moments)
    if route != FORWARD:
        moments = moments.swap()
    layer = AffineLayer(aligner.sites, aligner.d_x, aligner.d_y, start="linear")
    layer.adopt(aligner, moments)
    return layer
