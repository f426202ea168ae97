"""Computes the figures of one tile from what a pass has summed, and keeps nothing but the numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.similarity.algebra.grid import GridSums
from aligners.similarity.catalogue import ATTENTION, Measure
from aligners.similarity.controls import jackknife_interval, matching_layers
from aligners.similarity.functional.cca import SharedMoments
from aligners.similarity.passes.plan import Tile
from aligners.similarity.passes.sums import Matching, SpanSums, TileSums
from aligners.similarity.sample import Sample

Grids = dict[str, Tensor]  # direction -> (L_x, L_y)
Key = tuple[str, str]  # measure, figure


def evaluate(measure: Measure, *contents: Any, compute: Callable[..., Tensor] | None = None) -> Grids:
    """(L_x, L_y) in each direction: `both` for a symmetric measure, else `forward` (X to Y) and `backward`.

    Args:
        measure: which.
        contents: what it is computed from.
        compute: from these to (L_x, L_y). Default: the measure's own.
    """
    function = compute or measure.compute
    forward = function(*contents)
    if measure.symmetric:
        return {"both": forward}
    return {"forward": forward, "backward": function(*(content.swap() for content in contents)).mT}


class Content:
    """What the measures of one tile are computed from, in one stream.

    Args:
        x: what is kept of X; y: of Y.
        tile: of both.
        texts: ids of the texts of the samples' rows, group by group, by budget.
    """

    def __init__(self, x: SpanSums, y: SpanSums, tile: TileSums, texts: dict[int, Tensor]) -> None:
        self._x, self._y, self._tile, self._texts = x, y, tile, texts
        self._found: dict[str, Any] = {}

    @property
    def groups(self) -> int:
        """Groups of texts that are told apart."""
        return self._tile.groups

    def of(self, measure: Measure) -> Any:
        """What a measure is computed from, over all groups; one object for all measures that share it."""
        key = f"{measure.family} {measure.budget}"
        if key not in self._found:
            if measure.family == "moments":
                x, y = (side.moments["moments"][0] for side in (self._x, self._y))
                found: Any = SharedMoments(GridSums(x, y, self._tile.crosses["moments", 0, None]).centred())
            elif measure.family == "rows":
                found = self._sample(measure.budget)
            else:
                found = _joined(self._groups(measure))
            self._found[key] = found
        return self._found[key]

    def at(self, measure: Measure, a: int, b: int) -> list[Any]:
        """What is kept of each group at one of the matching pairs of layers, by index; it adds up."""
        if measure.family != "moments":
            return [each.pair(a, b) for each in self._groups(measure)]
        sides = zip(self._x.moments["moments"][1:], self._y.moments["moments"][1:], strict=True)
        return [
            GridSums(x.of(slice(a, a + 1)), y.of(slice(b, b + 1)), self._tile.crosses["moments", place, (a, b)])
            for place, (x, y) in enumerate(sides, 1)
        ]

    def _groups(self, measure: Measure) -> list[Any]:
        """What is kept of each group, for all layers."""
        if measure.family in self._tile.added:
            return self._tile.added[measure.family]
        if measure.family == "head_moments":
            x, y = (side.moments["head_moments"] for side in (self._x, self._y))
            crosses = self._tile.crosses.items()
            return [GridSums(x[p], y[p], cross) for (family, p, _), cross in crosses if family == "head_moments"]
        whole, groups = self._sample(measure.budget), self._tile.groups
        sizes = (whole.text % groups).bincount(minlength=groups).tolist()
        parts = zip(whole.x.split(sizes, 1), whole.y.split(sizes, 1), whole.text.split(sizes), strict=True)
        return [Sample(*part) for part in parts]

    def _sample(self, budget: int) -> Sample:
        return Sample(self._x.samples[budget], self._y.samples[budget], self._texts[budget])


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
            self._attempt(measure, "chance", lambda: evaluate(measure, own.of(measure), compute=measure.chance))
        for name, content in contents.items():
            if name not in ("value", "fit") and not (name == "standardised" and measure.family in ATTENTION):
                self._attempt(measure, name, partial(lambda content: evaluate(measure, content.of(measure)), content))
        if "fit" in contents:
            if measure.held_out is not None:
                both = (contents["fit"], own)
                held_out = partial(evaluate, measure, compute=measure.held_out)
                self._attempt(measure, "held_out", lambda: held_out(*(content.of(measure) for content in both)))
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
            raise UserError(
                "The jackknife leaves out groups of batches in turn and expects at least 2, but got 1 batch. Lower "
                "`data.batch_size`, or give more texts."
            )
        value = self.grids[measure.name, "value"]
        shape = next(iter(value.values())).shape
        low, high = ({name: torch.full(shape, torch.nan, dtype=torch.float64) for name in value} for _ in range(2))
        for a, b in matching if measure.family not in ATTENTION else matching_layers(*map(range, shape)):
            each = content.at(measure, a, b)
            whole = evaluate(measure, _joined(each))
            rest = [evaluate(measure, _joined(each[:g] + each[g + 1 :])) for g in range(len(each))]
            for direction, estimate in whole.items():
                ends = jackknife_interval(estimate, torch.stack([left_out[direction] for left_out in rest]))
                for grids, end in zip((low, high), ends, strict=True):
                    grids[direction][a, b] = end.cpu()
        self.grids[measure.name, "low"], self.grids[measure.name, "high"] = low, high
        return {}


def _joined(groups: Sequence[Any]) -> Any:
    """What a measure is computed from, of groups of texts together."""
    found = reduce(add, groups)
    return SharedMoments(found.moments()) if isinstance(found, GridSums) else found
