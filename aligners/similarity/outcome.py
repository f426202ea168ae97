"""Computes the figures of one tile from what a pass has summed, and keeps nothing but the numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from aligners.similarity.catalogue import ATTENTION, Measure
from aligners.similarity.controls import jackknife_interval, matching_layers
from aligners.similarity.passes.pass_plan import Tile
from aligners.similarity.passes.streams import FAR_VALUES
from aligners.similarity.passes.sums import Matching, TileSums, joined

OF_STATES = ("standardised", *FAR_VALUES.values())  # streams without attention
# direction -> (L_x, L_y), or both ends of intervals, (2, L_x, L_y)
Grids = dict[str, Tensor]
Key = tuple[str, str]  # measure, figure


def evaluate(measure: Measure, *contents: Any) -> Grids:
    """(L_x, L_y) in each direction: `both` for a symmetric measure, else `forward` (X to Y) and `backward`."""
    forward = measure.compute(*contents)
    if measure.symmetric:
        return {"both": forward}
    swapped = [content.swap() for content in contents]
    backward = measure.compute(*swapped)
    return {"forward": forward, "backward": backward.mT}


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
    def of(
        cls,
        tile: Tile,
        measures: Sequence[Measure],
        sums: Mapping[str, TileSums],
        matching: Matching,
    ) -> Self:
        """Compute them.

        Args:
            tile: which.
            measures: that are wanted.
            sums: sums of the tile, by stream: value, and with controls fit, untrained, standardised, aligned, null_0,
                null_1, ...
            matching: positions of the matching layers, for intervals.
        """
        figures = cls(tile)
        wanted = []
        for measure in measures:
            if tile.leads or measure.family not in ATTENTION:
                wanted.append(measure)
        # what PWCCA decomposes serves SVCCA, but not the reverse
        wanted.sort(key=lambda measure: measure.symmetric)
        for measure in wanted:
            figures._add(measure, sums)
        if "fit" in sums:
            figures._add_intervals(wanted, sums["value"], matching)
        return figures

    def _add(self, measure: Measure, sums: Mapping[str, TileSums]) -> None:
        """The value of a measure and, if there is one, what stands beside it."""
        observed = sums["value"]
        if not self._attempt(measure, "value", measure.compute, observed):
            return

        x, y = self.tile.pair
        if measure.chance is not None and x != y:
            moments = observed.of(measure).moments
            self.rows[measure.name] = int(moments.n)
            self._attempt(measure, "chance", measure.chance, observed)

        passed_over = {"value", "fit"}
        if measure.family in ATTENTION:
            passed_over.update(OF_STATES)
        for name, control in sums.items():
            if name not in passed_over:
                self._attempt(measure, name, measure.compute, control)
        if "fit" in sums and measure.held_out is not None:
            both = sums["fit"], observed
            self._attempt(measure, "held_out", measure.held_out, *both)

    def _attempt(
        self,
        measure: Measure,
        figure: str,
        compute: Callable[..., Tensor],
        *sums: TileSums,
    ) -> bool:
        """Keep a figure, or why there is none."""
        key = (measure.name, figure)
        contents = [each.of(measure) for each in sums]
        try:
            grids = evaluate(measure._replace(compute=compute), *contents)
        except ValueError as error:
            self.refused[key] = str(error)
            return False
        self.grids[key] = {way: values.cpu() for way, values in grids.items()}
        return True

    def _add_intervals(
        self, measures: Sequence[Measure], sums: TileSums, matching: Matching
    ) -> None:
        """The jackknife intervals of all measures that have a value."""
        by_content: dict[tuple[str, int], list[Measure]] = {}
        for measure in measures:
            if (measure.name, "value") not in self.grids:
                continue
            if sums.groups < 2:
                self.refused[measure.name, "interval"] = (
                    "The jackknife leaves out groups of batches in turn and expects at least 2, but got 1 batch. "
                    "Lower `data.batch_size`, or give more texts."
                )
                continue
            content = (measure.family, measure.budget)
            by_content.setdefault(content, []).append(measure)
        for same in by_content.values():
            self._add_intervals_of(same, sums, matching)

    def _add_intervals_of(
        self, measures: Sequence[Measure], sums: TileSums, matching: Matching
    ) -> None:
        """Add the intervals of measures of the same content: their ends at matching layers, NaN elsewhere.

        What is decomposed of the texts without a group serves all measures.
        """
        first = measures[0]
        intervals: dict[Measure, Grids] = {}
        for measure in measures:
            intervals[measure] = _no_ends(self.grids[measure.name, "value"])
        if first.family in ATTENTION:
            blocks = sums.x.shape.blocks, sums.y.shape.blocks
            matching = matching_layers(*map(range, blocks))

        for a, b in matching:
            groups = sums.at(first, a, b)
            for measure, estimates in self._estimates(measures, groups).items():
                for way, interval in _intervals(estimates).items():
                    ends = intervals[measure][way]
                    ends[0, a, b], ends[1, a, b] = interval
        for measure, grids in intervals.items():
            if (measure.name, "interval") not in self.refused:
                self.grids[measure.name, "interval"] = grids

    def _estimates(
        self, measures: Sequence[Measure], groups: list[Any]
    ) -> dict[Measure, list[Grids]]:
        """Each measure of all groups of texts, then without each of them; nothing of a measure that is refused."""
        estimates: dict[Measure, list[Grids]] = {measure: [] for measure in measures}
        parts = [groups]
        for g in range(len(groups)):
            parts.append(groups[:g] + groups[g + 1 :])
        for part in parts:
            content = joined(part)
            for measure in list(estimates):
                try:
                    estimates[measure].append(evaluate(measure, content))
                except ValueError as error:
                    self.refused.setdefault((measure.name, "interval"), str(error))
                    del estimates[measure]
        return estimates


def _no_ends(values: Grids) -> Grids:
    """Both ends of the intervals of values, (2, L_x, L_y) in each direction: none yet."""
    ends = {}
    for way, grid in values.items():
        shape = (2, *grid.shape)
        ends[way] = torch.full(shape, torch.nan, dtype=torch.float64)
    return ends


def _intervals(estimates: Sequence[Grids]) -> dict[str, tuple[Tensor, Tensor]]:
    """The interval in each direction of one layer pair, from estimates of all texts and without each group."""
    whole, *rest = estimates
    intervals = {}
    for way, estimate in whole.items():
        left_out = torch.stack([part[way] for part in rest])
        intervals[way] = jackknife_interval(estimate, left_out)
    return intervals
