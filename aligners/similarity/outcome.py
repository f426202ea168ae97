"""Computes the figures of one tile from what a pass has summed, and keeps nothing but the numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.similarity.catalogue import ATTENTION, Measure
from aligners.similarity.controls import jackknife_interval, matching_layers
from aligners.similarity.passes.plan import Tile
from aligners.similarity.passes.sums import Matching, TileSums, joined

Grids = dict[str, Tensor]  # direction -> (L_x, L_y), or both ends of intervals, (2, L_x, L_y)
Key = tuple[str, str]  # measure, figure


def evaluate(measure: Measure, *contents: Any) -> Grids:
    """(L_x, L_y) in each direction: `both` for a symmetric measure, else `forward` (X to Y) and `backward`."""
    forward = measure.compute(*contents)
    if measure.symmetric:
        return {"both": forward}
    return {"forward": forward, "backward": measure.compute(*(content.swap() for content in contents)).mT}


@dataclass
class TileFigures:
    """All figures of one tile, on the CPU: what is left of a pass.

    Attributes:
        tile: which.
        grids: by measure and figure: value, chance, held_out, interval, or a control stream's name.
        refused: why a figure could not be computed, likewise; it affects that figure only.
        rows: by measure, number of rows that a fit had.
    """

    tile: Tile
    grids: dict[Key, Grids] = field(default_factory=dict)
    refused: dict[Key, str] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, tile: Tile, measures: Sequence[Measure], sums: Mapping[str, TileSums], matching: Matching) -> Self:
        """Compute them.

        Args:
            tile: which.
            measures: that are wanted.
            sums: of the tile, by stream: value, and with controls fit, untrained, standardised, null_0, ...
            matching: positions of the matching layers, for intervals.
        """
        figures = cls(tile)
        for measure in measures:
            if measure.family not in ATTENTION or tile.leads:
                figures._add(measure, sums, matching)
        return figures

    def _add(self, measure: Measure, sums: Mapping[str, TileSums], matching: Matching) -> None:
        """The value of a measure and, if there is one, what stands beside it."""

        def of(compute: Callable[..., Tensor], *given: TileSums) -> Callable[[], Grids]:
            return lambda: evaluate(measure._replace(compute=compute), *(each.of(measure) for each in given))

        observed = sums["value"]
        if not self._attempt(measure, "value", of(measure.compute, observed)):
            return
        if measure.chance is not None and self.tile.x.model != self.tile.y.model:
            self.rows[measure.name] = int(observed.of(measure).moments.n)
            self._attempt(measure, "chance", of(measure.chance, observed))
        for name, control in sums.items():
            if name not in ("value", "fit") and not (name == "standardised" and measure.family in ATTENTION):
                self._attempt(measure, name, of(measure.compute, control))
        if "fit" in sums:
            if measure.held_out is not None:
                self._attempt(measure, "held_out", of(measure.held_out, sums["fit"], observed))
            self._attempt(measure, "interval", partial(self._interval, measure, observed, matching))

    def _attempt(self, measure: Measure, figure: str, compute: Callable[[], Grids]) -> bool:
        """Keep a figure, or why there is none."""
        key = measure.name, figure
        try:
            self.grids[key] = {direction: value.cpu() for direction, value in compute().items()}
        except ValueError as error:
            self.refused[key] = str(error)
        return key in self.grids

    def _interval(self, measure: Measure, sums: TileSums, matching: Matching) -> Grids:
        """The ends of the jackknife interval along matching layers, NaN elsewhere."""
        if sums.groups < 2:
            raise UserError(
                "The jackknife leaves out groups of batches in turn and expects at least 2, but got 1 batch. Lower "
                "`data.batch_size`, or give more texts."
            )
        values = self.grids[measure.name, "value"]
        shape = next(iter(values.values())).shape
        intervals = {direction: torch.full((2, *shape), torch.nan, dtype=torch.float64) for direction in values}
        for a, b in matching if measure.family not in ATTENTION else matching_layers(*map(range, shape)):
            groups = sums.at(measure, a, b)
            whole = evaluate(measure, joined(groups))
            rest = [evaluate(measure, joined(groups[:g] + groups[g + 1 :])) for g in range(len(groups))]
            for direction, estimate in whole.items():
                ends = jackknife_interval(estimate, torch.stack([left_out[direction] for left_out in rest]))
                intervals[direction][:, a, b] = torch.cat(ends).flatten().cpu()
        return intervals
