"""The tables of a comparison's report: of layer pairs, of single layers, and of pairs of models as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from aligners.similarity.functional.summaries import angular_distance, localization
from aligners.similarity.outcome import Grids

__all__ = ["Values", "distance_rows", "layer_rows", "rows_of"]

Row = dict[str, Any]
Values = Mapping[tuple[int, int, str], Grids]  # models and measure -> direction -> (L_x, L_y)
SIDES = {"both": "", "forward": " of X", "backward": " of Y"}  # whose variance, neurons or heads are explained
CONTROLS = ("low", "high", "held_out", "null", "null_high", "untrained", "ceiling", "chance")


def rows_of(
    head: Row, features: str, values: Grids, layers: Sequence[Sequence[int]], controls: Mapping[str, Grids]
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
        value = _numbers(grid, grid)
        beside = {name: _numbers(controls.get(name, {}).get(direction), grid) for name in CONTROLS}
        for (a, layer_x), (b, layer_y) in product(*(enumerate(numbers) for numbers in layers)):
            rows.append(
                {
                    **head,
                    "direction": direction,
                    "label": head["measure"] + SIDES[direction],
                    "features": features,
                    "layer_x": layer_x,
                    "layer_y": layer_y,
                    "value": value[a][b],
                    **{name: numbers[a][b] for name, numbers in beside.items()},
                }
            )
    return rows


def layer_rows(
    names: Sequence[str], layers: Sequence[Sequence[int]], norms: Mapping[int, Tensor], values: Values
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
            norm = None if m not in norms else float(norms[m][place])
            score = None if scores is None else float(scores[place])
            rows.append({"model": name, "layer": layer, "nuclear_norm": norm, "localization": score})
    return rows


def distance_rows(names: Sequence[str], values: Values) -> list[Row]:
    """Make a row for every pair of models of one depth: their angular distance, from `cka`."""
    rows: list[Row] = []
    for (i, j, measure), grids in values.items():
        cka = grids.get("both")
        if measure == "cka" and i != j and cka is not None and len(cka) == cka.shape[1]:
            distance = float(angular_distance(cka))
            rows.append({"model_x": names[i], "model_y": names[j], "angular_distance": distance})
    return rows


def _localization(m: int, values: Values) -> Tensor | None:
    """Wu et al. §5.1, over all other layers that model m was compared with; None without the two measures."""
    neurons, subspaces, own = [], [], []
    for i, j in dict.fromkeys((i, j) for i, j, _ in values if m in (i, j)):
        neuronsim, svcca = (values.get((i, j, name), {}) for name in ("neuronsim", "svcca"))
        if not neuronsim or not svcca:
            return None
        turned = m != i
        neurons.append(neuronsim["backward"].mT if turned else neuronsim["forward"])
        subspaces.append(svcca["both"].mT if turned else svcca["both"])
        own.append((torch.eye if i == j else torch.zeros)(*neurons[-1].shape).bool())
    return localization(*(torch.cat(grids, 1) for grids in (neurons, subspaces, own)))


def _numbers(grid: Tensor | None, like: Tensor) -> list[list[float | None]]:
    """The values of a grid, None where there is none."""
    given = torch.full_like(like, torch.nan) if grid is None else grid
    return [[value if value == value else None for value in row] for row in given.tolist()]
