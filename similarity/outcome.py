"""Computes the figures of a report from the accumulators of a pair of models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import product
from operator import add
from typing import Any

import torch
from torch import Tensor

from similarity.arms import Arm, evaluate
from similarity.catalogue import Measure
from similarity.controls import jackknife_interval, matching_layers
from similarity.functional.chance import MOST_BY_CHANCE

__all__ = ["Refusals", "caution", "controls_of", "rows_of"]

Grids = dict[str, Tensor]  # direction -> (L_x, L_y)
ARROWS = {"both": "", "forward": " X→Y", "backward": " Y→X"}
CONTROLS = ("low", "high", "held_out", "null", "null_high", "untrained", "ceiling", "chance")

logger = logging.getLogger(__name__)


class Refusals(dict[str, str]):
    """Why measures could not be computed: each refusal affects its own figure only."""

    def attempt(self, what: str, compute: Callable[[], Grids]) -> Grids:
        """Return the result of `compute`, on the CPU, or nothing if it raises ValueError, which is logged and kept."""
        try:
            return {direction: value.cpu() for direction, value in compute().items()}
        except ValueError as error:
            self[what] = str(error)
            logger.warning("No %s: %s", what, error)
            return {}


def controls_of(
    arms: Mapping[str, Arm],
    measure: Measure,
    same: Sequence[Grids],
    layers: Sequence[Sequence[int]],
    refusals: Refusals,
    said: str,
) -> dict[str, Grids]:
    """Control -> direction -> (L_x, L_y), for a measure of one pair of models.

    Args:
        arms: of this pair: value, fit, untrained, null_0, null_1, ...
        measure: the measure.
        same: its values within X and within Y.
        layers: numbers of the layers of X and of Y.
        refusals: where refusals are kept.
        said: measure and models, for the refusals.
    """

    def of(arm: str) -> Grids:
        return refusals.attempt(f"{said}, {arm}", lambda: evaluate(measure, arms[arm].content(measure)))

    nulls = [of(name) for name in arms if name.startswith("null")]
    found = {"untrained": of("untrained"), "ceiling": _ceiling(measure, *same)}
    if all(nulls):
        stacked = {direction: torch.stack([null[direction] for null in nulls]) for direction in nulls[0]}
        found["null"] = {direction: values.mean(0) for direction, values in stacked.items()}
        found["null_high"] = {direction: values.amax(0) for direction, values in stacked.items()}
    if measure.held_out is not None:
        fitted, held_out = arms["fit"], arms["value"]
        found["held_out"] = refusals.attempt(f"{said}, held out", lambda: _held_out(measure, fitted, held_out))
    ends: dict[str, Grids] = {"low": {}, "high": {}}

    def intervals() -> Grids:
        ends.update(_intervals(measure, arms["value"], layers))
        return {}

    refusals.attempt(f"{said}, interval", intervals)
    return {**found, **ends}


def caution(said: str, chance: Grids, rows: int) -> str | None:
    """Return a caution if there are few rows for the directions of a fit, or None if there are enough.

    Args:
        said: measure and models.
        chance: share of variance that independent data would have in common, by direction.
        rows: number of rows.
    """
    most = max((float(grid.max()) for grid in chance.values()), default=0.0)
    if most <= MOST_BY_CHANCE:
        return None
    return (
        f"{said}: fitted on {rows} rows, from which independent data would seem to share {most:.0%} of the variance. "
        f"Quote the held-out value (`controls`), or give {round(most * (rows - 1) / MOST_BY_CHANCE) + 1} rows or more."
    )


def rows_of(
    head: dict[str, Any], features: str, values: Grids, layers: Sequence[Sequence[int]], controls: dict[str, Grids]
) -> list[dict[str, Any]]:
    """Make a row for every direction and layer pair of a measure; missing figures are None.

    Args:
        head: columns that are the same in all rows, `measure` among them.
        features: raw or standardised.
        values: by direction.
        layers: numbers of the layers of X and of Y.
        controls: as `controls_of` returns them, or nothing.
    """
    rows = []
    for direction, grid in values.items():
        beside = [controls.get(name, {}).get(direction) for name in CONTROLS]
        for (a, layer_x), (b, layer_y) in product(*(enumerate(numbers) for numbers in layers)):
            rows.append(
                {
                    **head,
                    "direction": direction,
                    "label": head["measure"] + ARROWS[direction],
                    "features": features,
                    "layer_x": layer_x,
                    "layer_y": layer_y,
                    "value": _number(grid, a, b),
                    **{name: _number(control, a, b) for name, control in zip(CONTROLS, beside, strict=True)},
                }
            )
    return rows


def _ceiling(measure: Measure, within_x: Grids, within_y: Grids) -> Grids:
    """The similarity of each layer with itself; the smaller of the two."""
    if not within_x or not within_y:
        return {}
    own_x, own_y = (next(iter(grids.values())).diagonal() for grids in (within_x, within_y))
    grid = torch.minimum(own_x[:, None], own_y[None])
    return dict.fromkeys(("both",) if measure.symmetric else ("forward", "backward"), grid)


def _held_out(measure: Measure, fitted: Arm, held_out: Arm) -> Grids:
    function: Any = measure.held_out
    fit, test = fitted.content(measure), held_out.content(measure)
    if measure.symmetric:
        return {"both": function(fit, test)}
    return {"forward": function(fit, test), "backward": function(fit.swap(), test.swap()).mT}


def _intervals(measure: Measure, arm: Arm, layers: Sequence[Sequence[int]]) -> dict[str, Grids]:
    """Ends of the jackknife interval along matching layers; NaN elsewhere."""
    shape = [len(numbers) for numbers in layers]
    ends: dict[str, Grids] = {"low": {}, "high": {}}
    for layer_x, layer_y in matching_layers(*layers):
        a, b = layers[0].index(layer_x), layers[1].index(layer_y)
        here = arm.at(measure, a, b)
        if len(here) < 2:
            raise ValueError(
                "The jackknife leaves out groups of batches in turn and expects at least 2, but got 1 batch. Lower "
                "`data.batch_size`, or give more texts."
            )
        whole = evaluate(measure, reduce(add, here).content())
        rest = [evaluate(measure, reduce(add, here[:g] + here[g + 1 :]).content()) for g in range(len(here))]
        for direction, estimate in whole.items():
            both = jackknife_interval(estimate, torch.stack([left_out[direction] for left_out in rest]))
            for name, end in zip(ends, both, strict=True):
                grid = ends[name].setdefault(direction, torch.full(shape, torch.nan, dtype=torch.float64))
                grid[a, b] = end.cpu()
    return ends


def _number(grid: Tensor | None, a: int, b: int) -> float | None:
    value = torch.nan if grid is None else float(grid[a, b])
    return value if value == value else None
