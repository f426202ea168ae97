"""What is injected: the maps of the checkpoints, the closed forms, the floors, and in which direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aligners.alignment import Direction
from aligners.base import Aligner
from aligners.baselines import GaussianStates
from aligners.canonical import CCA, PWCCA, SVCCA
from aligners.linear import Identity, Linear, Mean, Procrustes
from aligners.permutation import Permutation
from aligners.storage import StoredAlignment
from frozen.model import FrozenModel

__all__ = ["BOTH_WAYS", "CLOSED", "CLOSED_FORMS", "TRAINED", "WHOLE", "Method", "Route", "build_route"]

CLOSED_FORMS: dict[str, Callable[[int, int, int], Aligner]] = {
    "linear": Linear,
    "procrustes": Procrustes,
    "permutation": Permutation,
    "cca": CCA,
    "svcca": SVCCA,
    "pwcca": PWCCA,
}
CLOSED, TRAINED, BOTH_WAYS = "closed form", "trained", "trained both ways"
INVERSE_OF_ONE_WAY = "inverse of a map trained one way"
WHOLE = ("native_x", "native_y", "random_classifier", "random_label")
FLOORS = ("mean", "identity", "random_embedding")


class Method(NamedTuple):
    """A way to get a state for Y: `map` takes source rows (S, N, d) and the batch; `inverse` target rows."""

    name: str
    role: str
    map: Callable[[Tensor, Any], Tensor]
    inverse: Callable[[Tensor], Tensor] | None
    about: dict[str, Any]
    aligner: Aligner | None = None


class Route(NamedTuple):
    """One direction of injection: from where, into which model, and all methods."""

    direction: Direction
    source: FrozenModel
    target: FrozenModel
    methods: list[Method]

    def orient(self, x: Any, y: Any) -> tuple[Any, Any]:
        """(source, target)."""
        return (x, y) if self.direction == "forward" else (y, x)


def build_route(
    direction: Direction,
    source: FrozenModel,
    target: FrozenModel,
    *,
    stored: Sequence[StoredAlignment],
    closed_form: Sequence[str],
    seed: int,
) -> Route:
    """Every method of one direction: floors, closed forms that no checkpoint holds, the checkpoints' maps.

    Args:
        direction: forward from X into Y, backward from Y into X.
        source: the model whose states are mapped.
        target: the model that they are put into.
        stored: the checkpoints; floors and closed forms come from the moments of the first.
        closed_form: names out of `CLOSED_FORMS`.
        seed: of the random states.
    """
    data, moments = stored[0].data, stored[0].moments
    moments = moments if direction == "forward" else moments.swap()
    fitted = _fitted(direction, stored)
    held = {name for name, _, _, _ in fitted}
    floors: dict[str, Callable[[int, int, int], Aligner]] = {"mean": Mean}
    if source.width == target.width:
        floors["identity"] = Identity
    methods = []
    for name, factory in {**floors, **{n: CLOSED_FORMS[n] for n in closed_form if n not in held}}.items():
        aligner = factory(len(stored[0].site_pairs), source.width, target.width)
        aligner.fit(moments)
        methods.append(_method(name, aligner, "floor" if name in floors else "method", _about(aligner, data, None)))
    about = {"class": "GaussianStates", "fit": CLOSED, "bijective": False, "fitted_on": _fitted_rows(data)}
    methods.append(Method("random_embedding", "floor", _drawn(GaussianStates(moments, seed)), None, about))
    for name, checkpoint, aligner, turned in fitted:
        about = _about(aligner, checkpoint.data, checkpoint.path, turned)
        methods.append(_method(name, aligner, "method", about, turned=turned))
    return Route(direction, source, target, methods)


def _fitted(
    direction: Direction, stored: Sequence[StoredAlignment]
) -> list[tuple[str, StoredAlignment, Aligner, bool]]:
    """The checkpoints' aligners that map in this direction, and whether that is through their inverse."""
    found: list[tuple[str, StoredAlignment, Aligner, bool]] = []
    for checkpoint in stored:
        maps = {name: (aligner, False) for name, aligner in checkpoint.maps[direction].items()}
        if direction == "backward":
            forward = checkpoint.maps["forward"].items()
            maps.update({name: (aligner, True) for name, aligner in forward if aligner.bijective})
        for name, (aligner, turned) in maps.items():
            taken = {*FLOORS, *WHOLE, *(known for known, _, _, _ in found)}
            found.append((_free_name(name, taken), checkpoint, aligner, turned))
    return found


def _method(name: str, aligner: Aligner, role: str, about: dict[str, Any], turned: bool = False) -> Method:
    there, back = (aligner.inverse, aligner) if turned else (aligner, aligner.inverse)
    return Method(name, role, lambda rows, batch: there(rows), back if aligner.invertible else None, about, aligner)


def _drawn(gaussian: GaussianStates) -> Callable[[Tensor, Any], Tensor]:
    def draw(rows: Tensor, batch: Any) -> Tensor:
        counts = torch.bincount(batch.rows.owner.cpu(), minlength=batch.rows.texts)
        return gaussian(batch.texts.text.cpu(), counts).to(rows.device)

    return draw


def _free_name(name: str, taken: set[str]) -> str:
    """`name`, or `name_2`, `name_3` ... where another checkpoint holds one of that name, or a floor bears it."""
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


def _fitted_rows(data: dict[str, Any]) -> str:
    special = "" if data["special_tokens"] or data["rows"] == "cls" else ", special tokens left out"
    return f"{data['rows']}{special}"


def _about(aligner: Aligner, data: dict[str, Any], path: Path | None, turned: bool = False) -> dict[str, Any]:
    """What a report says of a map: `parameters` of one site, how it was fitted and on which rows."""
    if aligner.closed_form:
        fit = CLOSED
    elif aligner.both_ways:
        fit = BOTH_WAYS
    else:
        fit = INVERSE_OF_ONE_WAY if turned else TRAINED
    return {
        "class": type(aligner).__name__,
        "options": aligner.options(),
        **aligner.findings(),
        "parameters": sum(p.numel() for p in aligner.parameters()) // aligner.sites or None,
        "fit": fit,
        "bijective": aligner.bijective,
        "fitted_on": _fitted_rows(data),
        "checkpoint": None if path is None else str(path),
    }
