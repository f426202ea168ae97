"""The maps of a run: how they are built and fitted from moments, and the direction in which each maps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from aligners.errors import UserError
from aligners.fitting.saved_bank import FORWARD
from aligners.maps.base import MORE_ROWS, Aligner
from aligners.maps.by_rows.kept_rows import ByRows, PairedRows
from aligners.maps.linear import Ridge
from aligners.maps.solvers import deviations
from aligners.similarity.algebra.moments import Moments

AlignerFactory = Callable[[int, int, int], Aligner]


class Fit(NamedTuple):
    """One aligner of a run: its name, its route from X to Y or from Y to X, and the bank itself."""

    name: str
    route: str
    aligner: Aligner

    @property
    def key(self) -> str:
        """A name that is unique within the run and in a bank's file."""
        return f"{self.route}.{self.name}"

    def orient(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Return (source, target) of this fit."""
        return (x, y) if self.route == FORWARD else (y, x)

    def moments(self, *each: Moments | None) -> list[Any]:
        """Return moments of pairs (x, y) as those of (source, target) of this fit."""
        if self.route == FORWARD:
            return list(each)
        return [moments and moments.swap() for moments in each]


def seeded(
    factory: AlignerFactory, seed: int, sites: int, d_x: int, d_y: int
) -> Aligner:
    """Return a bank whose initial weights depend only on the seed, not on what else is in the run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory(sites, d_x, d_y)


def fit_map(
    name: str,
    aligner: Aligner,
    moments: Moments,
    validation: Moments | None = None,
    *,
    advice: str = MORE_ROWS,
    kept: PairedRows | None = None,
    kept_validation: PairedRows | None = None,
) -> None:
    """Fit a closed form, or set the scaling and the start of a map that will be trained.

    Args:
        name: the map's name, for error messages.
        aligner: the map, not yet fitted.
        moments: moments of the fitting rows, in the map's direction.
        validation: moments of validation rows, in the map's direction, for maps that choose a strength on them; None:
            there are none.
        advice: what to do if there are too few rows, for error messages.
        kept: a draw of the fitting rows, in the map's direction, for maps that need rows.
        kept_validation: a draw of validation rows, for those that choose a strength on them.

    Raises:
        ValueError: there are fewer rows than the map needs; or the map is to be trained, and the states of a site are
            constant; or its own `fit` fails.
    """
    if moments.n < aligner.rows_needed:
        raise UserError(
            f"{name} expects at least {aligner.rows_needed} fitting rows at these widths, but got {int(moments.n)}. "
            f"{advice}"
        )
    if not aligner.closed_form:
        deviations(
            moments, constant_neurons=True
        )  # states are divided by their deviation
    if isinstance(aligner, Ridge):
        aligner.fit(moments, validation)
    elif isinstance(aligner, ByRows):
        aligner.fit(moments, kept, kept_validation)
    else:
        aligner.fit(moments)
