"""Joins the figures of tiles, and makes the tables of a comparison's report: layer pairs, layers, pairs of models."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
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
Values = Mapping[
    tuple[int, int, str], Grids
]  # models and measure -> direction -> (L_x, L_y)
SIDES = {
    "both": "",
    "forward": " of X",
    "backward": " of Y",
}  # whose variance, neurons or heads are explained
FAR = tuple(FAR_VALUES.values())
CONTROLS = (
    "low",
    "high",
    "held_out",
    "null",
    "null_high",
    "untrained",
    "ceiling",
    "chance",
    *FAR,
)


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
            x, y = figures.tile.x, figures.tile.y
            where = f"Of positions {x.first}-{x.end - 1} and {y.first}-{y.end - 1}, each counted from 0: "
            for key, why in figures.refused.items():
                self.refused.setdefault(key, why if figures.tile.whole else where + why)

    def grids(self, measure: Measure, figure: str) -> Grids:
        """A figure of all layer pairs; nothing if there is none of a tile."""
        joint: Grids = {}
        if self.refused.keys() & {(measure.name, figure), (measure.name, "value")}:
            return joint
        for figures in self._tiles:
            for direction, values in figures.grids.get(
                (measure.name, figure), {}
            ).items():
                if (
                    measure.family in ATTENTION
                ):  # which only one tile has, of all blocks
                    joint[direction] = values
                else:
                    nothing = torch.full(
                        (*values.shape[:-2], *self._shape),
                        torch.nan,
                        dtype=torch.float64,
                    )
                    grid = joint.setdefault(direction, nothing)
                    grid[..., figures.tile.x.layers, figures.tile.y.layers] = values
        return joint

    def refusals(
        self, measures: Sequence[Measure]
    ) -> Iterator[tuple[Measure, str, str]]:
        """Every measure and figure that could not be computed, and why."""
        for measure in measures:
            reasons = {
                figure: why
                for (name, figure), why in self.refused.items()
                if name == measure.name
            }
            for figure in reasons if "value" not in reasons else ("value",):
                yield measure, figure, reasons[figure]

    def controls(self, measure: Measure, same: Sequence[Grids]) -> dict[str, Grids]:
        """Control -> direction -> (L_x, L_y): all that stands beside the value, as far as there is any.

        Args:
            measure: which.
            same: its values within X and within Y.
        """
        interval = self.grids(measure, "interval")
        grids = {
            name: self.grids(measure, name)
            for name in ("held_out", "untrained", "chance", *FAR)
        }
        for end, name in enumerate(("low", "high")):
            grids[name] = {direction: ends[end] for direction, ends in interval.items()}
        keys = dict.fromkeys(
            key for figures in self._tiles for key in (*figures.grids, *figures.refused)
        )
        nulls = [
            self.grids(measure, name)
            for of, name in keys
            if of == measure.name and name.startswith("null")
        ]
        if nulls and all(nulls):
            stacked = {
                direction: torch.stack([null[direction] for null in nulls])
                for direction in nulls[0]
            }
            grids["null"] = {
                direction: values.mean(0) for direction, values in stacked.items()
            }
            grids["null_high"] = {
                direction: values.amax(0) for direction, values in stacked.items()
            }
        return {**grids, "ceiling": _ceiling(measure, *same)}

    def cautions(self, measure: Measure, said: str) -> list[str]:
        """A caution if there are few rows for the directions of a fit; nothing if there are enough.

        Args:
            measure: which.
            said: measure and models, for the caution.
        """
        rows = max(
            (figures.rows.get(measure.name, 0) for figures in self._tiles), default=0
        )
        most = max(
            (float(grid.max()) for grid in self.grids(measure, "chance").values()),
            default=0.0,
        )
        if most <= MOST_BY_CHANCE:
            return []
        return [
            f"{said}: fitted on {rows} rows, on which even independent data would share {most:.0%} of the "
            "variance. Quote the held-out value (`controls`), or give "
            f"{round(most * (rows - 1) / MOST_BY_CHANCE) + 1} rows or more."
        ]


def joined_norms(each: Sequence[Mapping[tuple[int, int], Tensor]]) -> dict[int, Tensor]:
    """Nuclear norm of each layer of each model, (L,); nothing without measures on moments.

    Args:
        each: of every pass, those of the spans that it read, by model and first position. The first pass counts.
    """
    norms: dict[tuple[int, int], Tensor] = {}
    for some in reversed(each):
        norms |= some
    models = {model for model, _ in norms}
    return {
        model: torch.cat([norms[key] for key in sorted(norms) if key[0] == model])
        for model in models
    }


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
    names = ("layer_x", "layer_y", "value", *CONTROLS)
    for direction, grid in values.items():
        about = {
            **head,
            "direction": direction,
            "label": head["measure"] + SIDES[direction],
            "features": features,
        }
        missing = torch.full_like(grid, torch.nan)
        grids = [
            grid,
            *(controls.get(name, {}).get(direction, missing) for name in CONTROLS),
        ]
        for pair, *figures in zip(
            product(*layers),
            *(figure.flatten().tolist() for figure in grids),
            strict=True,
        ):
            numbers = (None if figure != figure else figure for figure in figures)
            rows.append({**about, **dict(zip(names, (*pair, *numbers), strict=True))})
    return rows


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
        missing = [None] * len(layers[m])
        scores = _localization(m, values)
        columns = (
            norms[m].tolist() if m in norms else missing,
            missing if scores is None else scores.tolist(),
        )
        for layer, norm, score in zip(layers[m], *columns, strict=True):
            rows.append(
                {
                    "model": name,
                    "layer": layer,
                    "nuclear_norm": norm,
                    "localization": score,
                }
            )
    return rows


def distance_rows(names: Sequence[str], values: Values) -> list[Row]:
    """Make a row for every pair of models of one depth: their angular distance, from `cka`."""
    rows: list[Row] = []
    for (i, j, measure), grids in values.items():
        cka = grids.get("both")
        if measure == "cka" and i != j and cka is not None and len(cka) == cka.shape[1]:
            distance = float(angular_distance(cka))
            rows.append(
                {"model_x": names[i], "model_y": names[j], "angular_distance": distance}
            )
    return rows


def _localization(m: int, values: Values) -> Tensor | None:
    """Wu et al. §5.1, over all other layers that model m was compared with; None without the two measures."""
    neurons, subspaces, same = [], [], []
    for i, j in dict.fromkeys((i, j) for i, j, _ in values if m in (i, j)):
        neuronsim, svcca = (
            values.get((i, j, name), {}) for name in ("neuronsim", "svcca")
        )
        if not neuronsim or not svcca:
            return None
        turned = m != i
        neurons.append(neuronsim["backward"].mT if turned else neuronsim["forward"])
        subspaces.append(svcca["both"].mT if turned else svcca["both"])
        same.append((torch.eye if i == j else torch.zeros)(*neurons[-1].shape).bool())
    return localization(*(torch.cat(grids, 1) for grids in (neurons, subspaces, same)))


def _ceiling(measure: Measure, within_x: Grids, within_y: Grids) -> Grids:
    """The similarity of each layer with itself; the smaller of the two."""
    if not within_x or not within_y:
        return {}
    own_x, own_y = (
        next(iter(grids.values())).diagonal() for grids in (within_x, within_y)
    )
    grid = torch.minimum(own_x[:, None], own_y[None])
    return dict.fromkeys(
        ("both",) if measure.symmetric else ("forward", "backward"), grid
    )
