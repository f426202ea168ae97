"""Joins the figures of the tiles of a pair of models, which may come from several passes and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from aligners.similarity.catalogue import ATTENTION, Measure
from aligners.similarity.functional.chance import MOST_BY_CHANCE
from aligners.similarity.outcome import Grids, TileFigures

__all__ = ["PairFigures", "joined_norms"]


class PairFigures:
    """The figures of a pair of models, whose tiles may come from several passes.

    Args:
        tiles: of the pair.
        shape: number of layers of X and of Y.
    """

    def __init__(self, tiles: Iterable[TileFigures], shape: tuple[int, int]) -> None:
        self.tiles = sorted(tiles, key=lambda figures: figures.tile)
        self._shape = shape

    def grids(self, measure: Measure, figure: str) -> Grids:
        """A figure of all layer pairs; nothing if there is none of a tile."""
        key = measure.name, figure
        if self.refusal(measure, figure) is not None or self.refusal(measure, "value") is not None:
            return {}
        if measure.family in ATTENTION:
            return next((each.grids[key] for each in self.tiles if key in each.grids), {})
        joint: Grids = {}
        for each in self.tiles:
            for direction, values in each.grids.get(key, {}).items():
                grid = joint.setdefault(direction, torch.full(self._shape, torch.nan, dtype=torch.float64))
                grid[each.tile.x.layers, each.tile.y.layers] = values
        return joint

    def refusal(self, measure: Measure, figure: str) -> str | None:
        """Why a figure could not be computed."""
        key = measure.name, "interval" if figure in ("low", "high") else figure
        for each in self.tiles:
            if key in each.refused:
                x, y = each.tile.x, each.tile.y
                where = f"Of positions {x.first}-{x.end - 1} and {y.first}-{y.end - 1}, each counted from 0: "
                return each.refused[key] if each.tile.whole else where + each.refused[key]
        return None

    def refusals(self, measures: Sequence[Measure]) -> Iterator[tuple[Measure, str, str]]:
        """Every measure and figure that could not be computed, and why."""
        for measure in measures:
            figures = dict.fromkeys(name for each in self.tiles for of, name in each.refused if of == measure.name)
            for figure in figures if "value" not in figures else ("value",):
                yield measure, figure, str(self.refusal(measure, figure))

    def controls(self, measure: Measure, same: Sequence[Grids]) -> dict[str, Grids]:
        """Control -> direction -> (L_x, L_y): all that stands beside the value, as far as there is any.

        Args:
            measure: which.
            same: its values within X and within Y.
        """
        keys = [key for each in self.tiles for key in (*each.grids, *each.refused)]
        names = dict.fromkeys(figure for of, figure in keys if of == measure.name)
        nulls = [self.grids(measure, name) for name in names if name.startswith("null")]
        found = {name: self.grids(measure, name) for name in ("low", "high", "held_out", "untrained", "chance")}
        if nulls and all(nulls):
            stacked = {direction: torch.stack([null[direction] for null in nulls]) for direction in nulls[0]}
            found["null"] = {direction: values.mean(0) for direction, values in stacked.items()}
            found["null_high"] = {direction: values.amax(0) for direction, values in stacked.items()}
        return {**found, "ceiling": _ceiling(measure, *same)}

    def caution(self, measure: Measure, said: str) -> str | None:
        """Return a caution if there are few rows for the directions of a fit, or None if there are enough."""
        rows = max((tile.rows[measure.name] for tile in self.tiles if measure.name in tile.rows), default=0)
        return _caution(said, self.grids(measure, "chance"), rows)


def joined_norms(each: Sequence[Mapping[tuple[int, int], Tensor]]) -> dict[int, Tensor]:
    """Nuclear norm of each layer of each model, (L,); nothing without measures on moments.

    Args:
        each: of every pass, those of the spans that it read, by model and first position. The first pass counts.
    """
    norms: dict[tuple[int, int], Tensor] = {}
    for some in reversed(each):
        norms |= some
    spans: dict[int, list[Tensor]] = {}
    for model, first in sorted(norms):
        spans.setdefault(model, []).append(norms[model, first])
    return {model: torch.cat(parts) for model, parts in spans.items()}


def _ceiling(measure: Measure, within_x: Grids, within_y: Grids) -> Grids:
    """The similarity of each layer with itself; the smaller of the two."""
    if not within_x or not within_y:
        return {}
    own_x, own_y = (next(iter(grids.values())).diagonal() for grids in (within_x, within_y))
    grid = torch.minimum(own_x[:, None], own_y[None])
    return dict.fromkeys(("both",) if measure.symmetric else ("forward", "backward"), grid)


def _caution(said: str, chance: Grids, rows: int) -> str | None:
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
