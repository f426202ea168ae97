"""Joins the figures of tiles, and makes the tables of a comparison's report: layer pairs, layers, pairs of models."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import isnan
from typing import Any

import torch
from torch import Tensor

from aligners.similarity.catalogue import ATTENTION, Measure
from aligners.similarity.controls import calibrated
from aligners.similarity.functional.canonical_correlations import MOST_BY_CHANCE
from aligners.similarity.functional.cka import angular_distance
from aligners.similarity.functional.regression import localization
from aligners.similarity.outcome import Grids, TileFigures
from aligners.similarity.passes.streams import ALIGNED, FAR_VALUES

Row = dict[str, Any]
# models and measure -> direction -> (L_x, L_y)
Values = Mapping[tuple[int, int, str], Grids]
# whose variance, neurons or heads are explained
SIDES = {"both": "", "forward": " of X", "backward": " of Y"}
FAR = tuple(FAR_VALUES.values())
INTERVAL = ("low", "high", "held_out")
NULL = ("null", "null_high", "untrained")
CALIBRATED = ("effect", "p", "p_family")
CONTROLS = (*INTERVAL, *NULL, "ceiling", "chance", *FAR, *CALIBRATED)


class PairFigures:
    """The figures of a pair of models, whose tiles may come from several passes.

    Args:
        tiles: of the pair.
        shape: number of layers of X and of Y.

    Attributes:
        refused: by measure and figure, why a tile has none, so that the pair has none.
    """

    def __init__(self, tiles: Iterable[TileFigures], shape: tuple[int, int]) -> None:
        self._tiles = sorted(tiles, key=lambda figures: figures.tile)
        self._shape = shape
        self.refused: dict[tuple[str, str], str] = {}
        for figures in self._tiles:
            x, y, whole = figures.tile
            where = ""
            if not whole:
                where = f"Of positions {x.first}-{x.end - 1} and {y.first}-{y.end - 1}, each counted from 0: "
            for key, why in figures.refused.items():
                self.refused.setdefault(key, where + why)

    def grids(self, measure: Measure, figure: str) -> Grids:
        """A figure of all layer pairs; nothing if there is none of a tile."""
        joint: Grids = {}
        key = (measure.name, figure)
        value = (measure.name, "value")
        if key in self.refused or value in self.refused:
            return joint
        for figures in self._tiles:
            found = figures.grids.get(key, {})
            if measure.family in ATTENTION:  # of all blocks, which only one tile has
                joint |= found
                continue
            x, y, _ = figures.tile
            for direction, values in found.items():
                if direction not in joint:
                    *ends, _, _ = values.shape
                    shape = (*ends, *self._shape)
                    joint[direction] = values.new_full(shape, torch.nan)
                whole = joint[direction]
                whole[..., x.layers, y.layers] = values
        return joint

    def refusals(
        self, measures: Sequence[Measure]
    ) -> Iterator[tuple[Measure, str, str]]:
        """Every measure and figure that could not be computed, and why; without a value, that alone."""
        for measure in measures:
            reasons = {}
            for (name, figure), why in self.refused.items():
                if name == measure.name:
                    reasons[figure] = why
            if "value" in reasons:
                reasons = {"value": reasons["value"]}
            for figure, why in reasons.items():
                yield measure, figure, why

    def controls(self, measure: Measure, same: Sequence[Grids]) -> dict[str, Grids]:
        """Control -> direction -> (L_x, L_y): all that stands beside the value, as far as there is any.

        Args:
            measure: which.
            same: its values within X and within Y.
        """
        grids = {}
        for name in ("held_out", "untrained", "chance", *FAR):
            grids[name] = self.grids(measure, name)
        for name in ("low", "high", "null", "null_high", *CALIBRATED):
            grids[name] = {}
        intervals = self.grids(measure, "interval")
        for direction, (low, high) in intervals.items():
            grids["low"][direction] = low
            grids["high"][direction] = high
        values = self.grids(measure, "value")
        as_paired = self.grids(measure, ALIGNED)
        for direction, nulls in self._null(measure).items():
            found = calibrated(values[direction], nulls, as_paired.get(direction))
            grids["null"][direction] = found.null
            grids["null_high"][direction] = found.high
            for name in CALIBRATED:
                grids[name][direction] = getattr(found, name)
        grids["ceiling"] = _ceiling(measure, *same)
        return grids

    def _null(self, measure: Measure) -> Grids:
        """The values of a measure under all permutations, (P, L_x, L_y); nothing if there is none under one of them."""
        nulls = self._nulls(measure)
        if not nulls or not all(nulls):
            return {}
        stacked = {}
        for direction in nulls[0]:
            each = [null[direction] for null in nulls]
            stacked[direction] = torch.stack(each)
        return stacked

    def _nulls(self, measure: Measure) -> list[Grids]:
        """The values of a measure under each permutation, also where there are none."""
        names: dict[str, None] = {}
        for figures in self._tiles:
            keys = (*figures.grids, *figures.refused)
            for of, figure in keys:
                if of == measure.name and figure.startswith("null"):
                    names[figure] = None
        return [self.grids(measure, name) for name in names]

    def caution(self, measure: Measure) -> str | None:
        """What to say if there are few rows for the directions of a fit."""
        most = 0.0
        chance = self.grids(measure, "chance")
        for grid in chance.values():
            largest = float(grid.max())
            most = max(most, largest)
        if most <= MOST_BY_CHANCE:
            return None
        name = measure.name
        rows = max(figures.rows.get(name, 0) for figures in self._tiles)
        directions = most * (rows - 1)
        enough = round(directions / MOST_BY_CHANCE) + 1
        return (
            f"fitted on {rows} rows, on which even independent data would share {most:.0%} of the variance. "
            f"Quote the held-out value (`controls`), or give {enough} rows or more."
        )


def joined_norms(each: Sequence[Mapping[tuple[int, int], Tensor]]) -> dict[int, Tensor]:
    """Nuclear norm of each layer of each model, (L,); nothing without measures on moments.

    Args:
        each: of every pass, those of the spans that it read, by model and first position. The first pass counts.
    """
    norms: dict[tuple[int, int], Tensor] = {}
    for some in reversed(each):
        norms |= some
    spans: dict[int, list[Tensor]] = {}
    for span in sorted(norms):
        model, _ = span
        parts = spans.setdefault(model, [])
        parts.append(norms[span])
    return {model: torch.cat(parts) for model, parts in spans.items()}


def rows_of(
    head: Row,
    features: str,
    values: Grids,
    layers: Sequence[Sequence[int]],
    controls: Mapping[str, Grids],
) -> list[Row]:
    """Make a row for every direction and layer pair of a measure; missing figures are None.

    Args:
        head: columns that are the same in all rows, `measure` among them.
        features: raw or standardised.
        values: by direction.
        layers: numbers of the layers of X and of Y.
        controls: what stands beside the values, by name.
    """
    rows = []
    pairs = list(product(*layers))
    for direction, grid in values.items():
        label = head["measure"] + SIDES[direction]
        about = {**head, "direction": direction, "label": label}
        about["features"] = features
        missing = torch.full_like(grid, torch.nan)
        columns = {"value": _listed(grid)}
        for name in CONTROLS:
            by_direction = controls.get(name, {})
            control = by_direction.get(direction, missing)
            columns[name] = _listed(control)
        for place, (layer_x, layer_y) in enumerate(pairs):
            row = {**about, "layer_x": layer_x, "layer_y": layer_y}
            for name, figures in columns.items():
                row[name] = figures[place]
            rows.append(row)
    return rows


def _listed(grid: Tensor) -> list[float | None]:
    """The figures of all layer pairs, None for NaN."""
    figures: list[float | None] = []
    for figure in grid.flatten().tolist():
        if isnan(figure):
            figure = None
        figures.append(figure)
    return figures


def layer_rows(
    names: Sequence[str],
    layers: Sequence[Sequence[int]],
    norms: Mapping[int, Tensor],
    values: Values,
) -> list[Row]:
    """Make a row for every layer of every model: nuclear norm and localization score, None where there is none.

    Args:
        names: names of the models.
        layers: numbers of each model's layers.
        norms: nuclear norm of each layer, by model.
        values: values of all pairs.
    """
    rows: list[Row] = []
    for m, name in enumerate(names):
        scores = _localization(m, values)
        for place, layer in enumerate(layers[m]):
            row: Row = {"model": name, "layer": layer}
            row |= {"nuclear_norm": None, "localization": None}
            if m in norms:
                norm = norms[m][place]
                row["nuclear_norm"] = norm.item()
            if scores is not None:
                score = scores[place]
                row["localization"] = score.item()
            rows.append(row)
    return rows


def distance_rows(names: Sequence[str], values: Values) -> list[Row]:
    """Make a row for every pair of models of one depth: their angular distance, from `cka`."""
    rows: list[Row] = []
    for (i, j, measure), grids in values.items():
        if measure != "cka" or i == j or not grids:
            continue
        cka = grids["both"]
        layers_x, layers_y = cka.shape
        if layers_x != layers_y:
            continue
        row: Row = {"model_x": names[i], "model_y": names[j]}
        distance = angular_distance(cka)
        row["angular_distance"] = float(distance)
        rows.append(row)
    return rows


def _localization(m: int, values: Values) -> Tensor | None:
    """Wu et al. §5.1, over all other layers that model m was compared with; None without the two measures."""
    neurons, subspaces, same = [], [], []
    for (i, j, measure), neuronsim in values.items():
        if measure != "neuronsim" or m not in (i, j):
            continue
        svcca = values.get((i, j, "svcca"))
        if not neuronsim or not svcca:
            return None
        of_subspaces = svcca["both"]
        of_neurons = neuronsim["forward"]
        if m != i:
            of_subspaces = of_subspaces.mT
            of_neurons = neuronsim["backward"].mT
        neurons.append(of_neurons)
        subspaces.append(of_subspaces)
        own = torch.zeros_like(of_neurons, dtype=torch.bool)
        if i == j:
            own.fill_diagonal_(True)
        same.append(own)
    if not same:
        return None
    columns = (torch.cat(parts, 1) for parts in (neurons, subspaces, same))
    return localization(*columns)


def _ceiling(measure: Measure, within_x: Grids, within_y: Grids) -> Grids:
    """The similarity of each layer with itself; the smaller of the two."""
    if not within_x or not within_y:
        return {}
    of_x, *_ = within_x.values()
    of_y, *_ = within_y.values()
    own_x = of_x.diagonal()
    own_y = of_y.diagonal()
    grid = own_x[:, None].minimum(own_y)
    if measure.symmetric:
        return {"both": grid}
    return {"forward": grid, "backward": grid}
