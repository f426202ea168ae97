"""Joins the figures of tiles, and makes the tables of a comparison's report: layer pairs, layers, pairs of models."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import isnan
from typing import Any

import torch
from torch import Tensor

from aligners.similarity.catalogue import ATTENTION, Measure
from aligners.similarity.functional.canonical_correlations import MOST_BY_CHANCE
from aligners.similarity.functional.cka import angular_distance
from aligners.similarity.functional.regression import localization
from aligners.similarity.outcome import Grids, TileFigures
from aligners.similarity.passes.streams import FAR_VALUES

Row = dict[str, Any]
# models and measure -> direction -> (L_x, L_y)
Values = Mapping[tuple[int, int, str], Grids]
# whose variance, neurons or heads are explained
SIDES = {"both": "", "forward": " of X", "backward": " of Y"}
FAR = tuple(FAR_VALUES.values())
INTERVAL = ("low", "high", "held_out")
NULL = ("null", "null_high", "untrained")
CONTROLS = (*INTERVAL, *NULL, "ceiling", "chance", *FAR)


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
            where = f"Of positions {x.first}-{x.end - 1} and {y.first}-{y.end - 1}, each counted from 0: "
            for key, why in figures.refused.items():
                if not whole:
                    why = where + why
                self.refused.setdefault(key, why)

    def grids(self, measure: Measure, figure: str) -> Grids:
        """A figure of all layer pairs; nothing if there is none of a tile."""
        joint: Grids = {}
        key = (measure.name, figure)
        if key in self.refused or (measure.name, "value") in self.refused:
            return joint
        for figures in self._tiles:
            found = figures.grids.get(key, {})
            if measure.family in ATTENTION:  # of all blocks, which only one tile has
                joint |= found
                continue
            x, y, _ = figures.tile
            for direction, values in found.items():
                if direction not in joint:
                    shape = (*values.shape[:-2], *self._shape)
                    joint[direction] = values.new_full(shape, torch.nan)
                joint[direction][..., x.layers, y.layers] = values
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
        for name in ("low", "high", "null", "null_high"):
            grids[name] = {}
        for direction, (low, high) in self.grids(measure, "interval").items():
            grids["low"][direction] = low
            grids["high"][direction] = high

        nulls = self._nulls(measure)
        if nulls and all(nulls):
            for direction in nulls[0]:
                stacked = torch.stack([null[direction] for null in nulls])
                grids["null"][direction] = stacked.mean(0)
                grids["null_high"][direction] = stacked.amax(0)
        grids["ceiling"] = _ceiling(measure, *same)
        return grids

    def _nulls(self, measure: Measure) -> list[Grids]:
        """The values of a measure under each permutation, also where there are none."""
        names: dict[str, None] = {}
        for figures in self._tiles:
            for of, figure in (*figures.grids, *figures.refused):
                if of == measure.name and figure.startswith("null"):
                    names[figure] = None
        return [self.grids(measure, name) for name in names]

    def caution(self, measure: Measure) -> str | None:
        """What to say if there are few rows for the directions of a fit."""
        most = 0.0
        for grid in self.grids(measure, "chance").values():
            most = max(most, float(grid.max()))
        if most <= MOST_BY_CHANCE:
            return None
        rows = max(figures.rows.get(measure.name, 0) for figures in self._tiles)
        enough = round(most * (rows - 1) / MOST_BY_CHANCE) + 1
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
    for (model, _), values in sorted(norms.items(), key=lambda item: item[0]):
        spans.setdefault(model, []).append(values)
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
    for direction, grid in values.items():
        label = head["measure"] + SIDES[direction]
        about = {**head, "direction": direction, "label": label, "features": features}
        missing = torch.full_like(grid, torch.nan)
        columns = {"value": grid.flatten().tolist()}
        for name in CONTROLS:
            control = controls.get(name, {}).get(direction, missing)
            columns[name] = control.flatten().tolist()
        for place, (layer_x, layer_y) in enumerate(product(*layers)):
            row = {**about, "layer_x": layer_x, "layer_y": layer_y}
            for name, figures in columns.items():
                row[name] = _known(figures[place])
            rows.append(row)
    return rows


def _known(figure: float) -> float | None:
    """None for NaN."""
    if isnan(figure):
        return None
    return figure


def layer_rows(
    names: Sequence[str],
    layers: Sequence[Sequence[int]],
    norms: Mapping[int, Tensor],
    values: Values,
) -> list[Row]:
    """Make a row for every layer of every model: nuclear norm and localization score, None where there is none.

    Args:
        names: of the models.
        layers: numbers of each model's layers.
        norms: nuclear norm of each layer, by model.
        values: of all pairs.
    """
    rows: list[Row] = []
    for m, name in enumerate(names):
        scores = _localization(m, values)
        for place, layer in enumerate(layers[m]):
            row: Row = {"model": name, "layer": layer}
            row |= {"nuclear_norm": None, "localization": None}
            if m in norms:
                row["nuclear_norm"] = norms[m][place].item()
            if scores is not None:
                row["localization"] = scores[place].item()
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
        if layers_x == layers_y:
            row = {"model_x": names[i], "model_y": names[j]}
            rows.append({**row, "angular_distance": float(angular_distance(cka))})
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
        if m == i:
            neurons.append(neuronsim["forward"])
            subspaces.append(svcca["both"])
        else:
            neurons.append(neuronsim["backward"].mT)
            subspaces.append(svcca["both"].mT)
        own = torch.zeros(neurons[-1].shape, dtype=torch.bool)
        if i == j:
            own.fill_diagonal_(True)
        same.append(own)
    if not same:
        return None
    columns = torch.cat(neurons, 1), torch.cat(subspaces, 1)
    return localization(*columns, torch.cat(same, 1))


def _ceiling(measure: Measure, within_x: Grids, within_y: Grids) -> Grids:
    """The similarity of each layer with itself; the smaller of the two."""
    if not within_x or not within_y:
        return {}
    of_x, *_ = within_x.values()
    of_y, *_ = within_y.values()
    grid = torch.minimum(of_x.diagonal()[:, None], of_y.diagonal())
    if measure.symmetric:
        return {"both": grid}
    return {"forward": grid, "backward": grid}
