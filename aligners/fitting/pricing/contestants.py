"""The maps that are compared, each with the same number of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from aligners.errors import UserError
from aligners.fitting.fits import AlignerFactory
from aligners.maps.base import Aligner
from aligners.maps.inn import INN
from aligners.maps.linear import Linear
from aligners.maps.mlp import MLP, FreeForm

FREE = "mlp"
NAMES = ("linear", "inn_paper", "inn_one_way", "inn", FREE, "free_form")
DEFAULT = ("linear", "inn_one_way", "inn", FREE, "free_form")


def check_names(names: Sequence[str]) -> None:
    """Raise if a name is not that of a map that can be compared.

    Raises:
        ValueError: naming the known ones; or the free network, by which all are judged, is missing.
    """
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise UserError(f"Expected `maps` from {', '.join(NAMES)}, but got {', '.join(unknown) or 'none'}.")
    if FREE not in names:
        raise UserError(f"Expected `maps` to include {FREE!r}, whose FVU is the measure of the others.")


def one_way(name: str) -> bool:
    """Whether a map has no way back, so that another one has to be fitted from Y to X."""
    return name in ("linear", FREE)


def factory(name: str, parameters: int) -> AlignerFactory:
    """Make a map of a size.

    Args:
        name: one of `NAMES`.
        parameters: of a site, matched as nearly as the map's widths allow. Closed forms have none.
    """
    made: dict[str, AlignerFactory] = {
        "linear": Linear,
        "inn_paper": _inn(parameters, partial(INN, mixing="none", both_ways=False)),
        "inn_one_way": _inn(parameters, partial(INN, both_ways=False)),
        "inn": _inn(parameters, INN),
        FREE: partial(MLP, parameters=parameters),
        "free_form": partial(FreeForm, parameters=parameters),
    }
    return made[name]


def _inn(parameters: int, inn: Callable[..., INN]) -> AlignerFactory:
    def make(sites: int, d_x: int, d_y: int) -> INN:
        with torch.device("meta"):
            one, two = (parameters_of(inn(1, d_x, d_y, hidden=hidden)) for hidden in (1, 2))
        hidden = 1 + round((parameters - one) / (two - one))  # the size is linear in the conditioners' width
        if hidden < 1:
            raise UserError(f"Expected `parameters` to be at least {one} for an INN of width {d_x}, got {parameters}.")
        return inn(sites, d_x, d_y, hidden=hidden)

    return make


def parameters_of(aligner: Aligner) -> int:
    """Parameters of one site."""
    return sum(weight[0].numel() for weight in aligner.parameters())
