"""Computes the figures of one tile from what a pass has summed, and keeps nothing but the numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from aligners.similarity.catalogue import ATTENTION, Measure
from aligners.similarity.controls import jackknife_interval, matching_layers
from aligners.similarity.passes.contents import Content, evaluate
from aligners.similarity.passes.plan import Tile
from aligners.similarity.passes.sums import Matching

__all__ = ["Grids", "TileFigures"]

Grids = dict[str, Tensor]  # direction -> (L_x, L_y)
Key = tuple[str, str]  # measure, figure


@dataclass
class TileFigures:
    """All figures of one tile, on the CPU: what is left of a pass.

    Attributes:
        tile: which.
        grids: by measure and figure: value, chance, held_out, low, high, or a control stream's name.
        refused: why a figure could not be computed, likewise; it affects that figure only. Both ends of an interval are
            one figure, `interval`.
        rows: by measure, number of rows that a fit had.
    """

    tile: Tile
    grids: dict[Key, Grids] = field(default_factory=dict)
    refused: dict[Key, str] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tile: Tile, measures: Sequence[Measure], contents: Mapping[str, Content], matching: Matching
    ) -> TileFigures:
        """Compute them.

        Args:
            tile: which.
            measures: that are wanted.
            contents: of the tile, by stream: value, and with controls fit, untrained, standardised, null_0, ...
            matching: positions of the matching layers, for intervals.
        """
        made = cls(tile)
        for measure in measures:
            if measure.family not in ATTENTION or tile.leads:
                made._add(measure, contents, matching)
        return made

    def _add(self, measure: Measure, contents: Mapping[str, Content], matching: Matching) -> None:
        """The value of a measure and, if there is one, what stands beside it."""
        own = contents["value"]
        if not self._attempt(measure, "value", lambda: evaluate(measure, own.of(measure))):
            return
        if measure.chance is not None and self.tile.x.model != self.tile.y.model:
            self.rows[measure.name] = int(own.of(measure).moments.n)
            by_chance = measure._replace(compute=measure.chance)
            self._attempt(measure, "chance", lambda: evaluate(by_chance, own.of(measure)))
        for name, content in contents.items():
            if name not in ("value", "fit") and not (name == "standardised" and measure.family in ATTENTION):
                self._attempt(measure, name, partial(_value, measure, content))
        if "fit" in contents and measure.held_out is not None:
            self._attempt(measure, "held_out", lambda: _held_out(measure, contents["fit"], own))
        if "fit" in contents:
            self._attempt(measure, "interval", lambda: self._interval(measure, own, matching))

    def _attempt(self, measure: Measure, figure: str, compute: Callable[[], Grids]) -> bool:
        """Keep a figure, or why there is none."""
        try:
            grids = {direction: value.cpu() for direction, value in compute().items()}
        except ValueError as error:
            self.refused[measure.name, figure] = str(error)
            return False
        self.grids[measure.name, figure] = grids
        return True

    def _interval(self, measure: Measure, content: Content, matching: Matching) -> Grids:
        """Keep the ends of the jackknife interval along matching layers, NaN elsewhere."""
        if content.groups < 2:
            raise ValueError(
                "The jackknife leaves out groups of batches in turn and expects at least 2, but got 1 batch. Lower "
                "`data.batch_size`, or give more texts."
            )
        shape = next(iter(self.grids[measure.name, "value"].values())).shape
        ends: dict[str, Grids] = {"low": {}, "high": {}}
        for a, b in matching if measure.family not in ATTENTION else matching_layers(*map(range, shape)):
            for direction, both in _ends(measure, content, a, b).items():
                for name, end in zip(ends, both, strict=True):
                    grid = ends[name].setdefault(direction, torch.full(shape, torch.nan, dtype=torch.float64))
                    grid[a, b] = end.cpu()
        for name, grids in ends.items():
            self.grids[measure.name, name] = grids
        return {}


def _value(measure: Measure, content: Content) -> Grids:
    return evaluate(measure, content.of(measure))


def _held_out(measure: Measure, fitted: Content, held_out: Content) -> Grids:
    function: Any = measure.held_out
    fit, test = fitted.of(measure), held_out.of(measure)
    if measure.symmetric:
        return {"both": function(fit, test)}
    return {"forward": function(fit, test), "backward": function(fit.swap(), test.swap()).mT}


def _ends(measure: Measure, content: Content, a: int, b: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Both ends of the jackknife interval of a layer pair, by direction."""
    here = content.at(measure, a, b)
    whole = evaluate(measure, reduce(add, here).content())
    rest = [evaluate(measure, reduce(add, here[:g] + here[g + 1 :]).content()) for g in range(len(here))]
    return {
        direction: jackknife_interval(estimate, torch.stack([left_out[direction] for left_out in rest]))
        for direction, estimate in whole.items()
    }
