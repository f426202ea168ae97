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
Grids = dict[
    str, Tensor
]  # direction -> (L_x, L_y), or both ends of intervals, (2, L_x, L_y)
Key = tuple[str, str]  # measure, figure


def evaluate(measure: Measure, *contents: Any) -> Grids:
    """(L_x, L_y) in each direction: `both` for a symmetric measure, else `forward` (X to Y) and `backward`."""
    forward = measure.compute(*contents)
    if measure.symmetric:
        return {"both": forward}
    return {
        "forward": forward,
        "backward": measure.compute(*(content.swap() for content in contents)).mT,
    }


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
            sums: of the tile, by stream: value, and with controls fit, untrained, standardised, null_0, ...
            matching: positions of the matching layers, for intervals.
        """
        figures = cls(tile)
        some = [
            measure
            for measure in measures
            if measure.family not in ATTENTION or tile.leads
        ]
        some.sort(
            key=lambda measure: measure.symmetric
        )  # what PWCCA decomposes serves SVCCA, but not the reverse
        for measure in some:
            figures._add(measure, sums)
        if "fit" in sums:
            figures._add_intervals(
                [m for m in some if (m.name, "value") in figures.grids],
                sums["value"],
                matching,
            )
        return figures

    def _add(self, measure: Measure, sums: Mapping[str, TileSums]) -> None:
        """The value of a measure and, if there is one, what stands beside it."""

        def of(compute: Callable[..., Tensor], *given: TileSums) -> Callable[[], Grids]:
            return lambda: evaluate(
                measure._replace(compute=compute), *(each.of(measure) for each in given)
            )

        observed = sums["value"]
        if not self._attempt(measure, "value", of(measure.compute, observed)):
            return
        if measure.chance is not None and self.tile.x.model != self.tile.y.model:
            self.rows[measure.name] = int(observed.of(measure).moments.n)
            self._attempt(measure, "chance", of(measure.chance, observed))
        for name, control in sums.items():
            if name not in ("value", "fit") and not (
                name in OF_STATES and measure.family in ATTENTION
            ):
                self._attempt(measure, name, of(measure.compute, control))
        if "fit" in sums and measure.held_out is not None:
            self._attempt(
                measure, "held_out", of(measure.held_out, sums["fit"], observed)
            )

    def _attempt(
        self, measure: Measure, figure: str, compute: Callable[[], Grids]
    ) -> bool:
        """Keep a figure, or why there is none."""
        key = measure.name, figure
        try:
            self.grids[key] = {
                direction: value.cpu() for direction, value in compute().items()
            }
        except ValueError as error:
            self.refused[key] = str(error)
        return key in self.grids

    def _add_intervals(
        self, measures: Sequence[Measure], sums: TileSums, matching: Matching
    ) -> None:
        """The ends of the jackknife intervals along matching layers, NaN elsewhere.

        What is decomposed of the texts without a group serves all measures.
        """
        if sums.groups < 2:
            why = (
                "The jackknife leaves out groups of batches in turn and expects at least 2, but got 1 batch. Lower "
                "`data.batch_size`, or give more texts."
            )
            self.refused |= {(measure.name, "interval"): why for measure in measures}
            return
        by_content: dict[tuple[str, int], list[Measure]] = {}
        for measure in measures:
            by_content.setdefault((measure.family, measure.budget), []).append(measure)
        for same in by_content.values():
            values = {measure: self.grids[measure.name, "value"] for measure in same}
            shape = next(iter(values[same[0]].values())).shape
            nothing = torch.full((2, *shape), torch.nan, dtype=torch.float64)
            intervals = {
                measure: {way: nothing.clone() for way in values[measure]}
                for measure in same
            }
            for a, b in (
                matching
                if same[0].family not in ATTENTION
                else matching_layers(*map(range, shape))
            ):
                for measure, (whole, *rest) in self._estimates(
                    same, sums.at(same[0], a, b)
                ).items():
                    for way, estimate in whole.items():
                        ends = jackknife_interval(
                            estimate, torch.stack([left_out[way] for left_out in rest])
                        )
                        intervals[measure][way][:, a, b] = (
                            torch.cat(ends).flatten().cpu()
                        )
            for measure in same:
                if (measure.name, "interval") not in self.refused:
                    self.grids[measure.name, "interval"] = intervals[measure]

    def _estimates(
        self, measures: Sequence[Measure], groups: list[Any]
    ) -> dict[Measure, list[Grids]]:
        """Each measure of all groups of texts, then without each of them; nothing of a measure that is refused."""
        estimates: dict[Measure, list[Grids]] = {measure: [] for measure in measures}
        for part in (
            groups,
            *(groups[:g] + groups[g + 1 :] for g in range(len(groups))),
        ):
            content = joined(part)
            for measure in list(estimates):
                try:
                    estimates[measure].append(evaluate(measure, content))
                except ValueError as error:
                    self.refused.setdefault((measure.name, "interval"), str(error))
                    del estimates[measure]
        return estimates
