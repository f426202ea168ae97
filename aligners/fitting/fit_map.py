"""Fitting a map from moments, with the checks that every map needs before it."""

from __future__ import annotations

from aligners.maps.base import Aligner
from aligners.maps.linear import deviations
from similarity.functional.moments import Moments

__all__ = ["fit_map"]


ADVICE = "Give more texts, or use `rows` 'tokens'."


def fit_map(name: str, aligner: Aligner, moments: Moments, advice: str = ADVICE) -> None:
    """Fit a map, or give a trained one its scaling and its start.

    Args:
        name: of the map, for the message.
        aligner: not yet fitted.
        moments: of the fitting rows, in the map's direction.
        advice: what to do where they are too few.

    Raises:
        ValueError: there are fewer rows than the map needs; it is to be trained, and the states of a site are constant;
            or what its own `fit` raises.
    """
    if moments.n < aligner.rows_needed:
        raise ValueError(
            f"{name} expects at least {aligner.rows_needed} fitting rows at these widths, but got {int(moments.n)}. "
            f"{advice}"
        )
    if not aligner.closed_form:
        deviations(moments, constant_neurons=True)  # they are divided by it
    aligner.fit(moments)
