"""Fits a map from moments, after the checks that every map needs."""

from __future__ import annotations

from aligners.maps.base import MORE_ROWS, Aligner
from aligners.maps.linear import Ridge, deviations
from aligners.similarity.algebra.moments import Moments

__all__ = ["fit_map"]


def fit_map(
    name: str, aligner: Aligner, moments: Moments, validation: Moments | None = None, *, advice: str = MORE_ROWS
) -> None:
    """Fit a closed form, or set the scaling and the start of a map that will be trained.

    Args:
        name: the map's name, for error messages.
        aligner: the map, not yet fitted.
        moments: moments of the fitting rows, in the map's direction.
        validation: moments of validation rows, for maps that choose a strength on them, likewise; None: there are none.
        advice: what to do if there are too few rows, for error messages.

    Raises:
        ValueError: there are fewer rows than the map needs; or the map is to be trained, and the states of a site are
            constant; or its own `fit` fails.
    """
    if moments.n < aligner.rows_needed:
        raise ValueError(
            f"{name} expects at least {aligner.rows_needed} fitting rows at these widths, but got {int(moments.n)}. "
            f"{advice}"
        )
    if not aligner.closed_form:
        deviations(moments, constant_neurons=True)  # states are divided by them
    if isinstance(aligner, Ridge):
        aligner.fit(moments, validation)
    else:
        aligner.fit(moments)
