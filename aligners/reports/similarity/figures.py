"""Figures of a comparison of layers: heat maps of all layer pairs, and lines along matching layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from aligners.reports.drawing import heat_map, layer_grid, name_sites, panels
from aligners.reports.names import site_name
from aligners.reports.report import Row
from aligners.similarity.controls import matching_layers

__all__ = ["block_map", "heat_maps", "layer_lines", "pair_lines"]

PANELS_ABREAST = 5
LARGEST = 14  # inches
CELL, SMALL_CELL = 0.42, 0.27  # inches, with a number in letters of either size
LINES: dict[str, dict[str, Any]] = {
    "value": {"color": "#0072B2", "marker": "o", "linewidth": 1.6},
    "held_out": {"color": "#D55E00", "marker": "s", "linewidth": 1.3, "linestyle": "--"},
    "standardised": {"color": "#009E73", "marker": "D", "linewidth": 1.3, "linestyle": "-."},
    "untrained": {"color": "#E69F00", "marker": "^", "linewidth": 1.1},
    "null": {"color": "0.5", "marker": "x", "linewidth": 1.1, "linestyle": ":"},
    "ceiling": {"color": "0.75", "linewidth": 1.0},
}
SAID = {
    "value": "value",
    "held_out": "fitted on other texts",
    "standardised": "features standardised",
    "untrained": "untrained twins",
    "null": "null: texts permuted",
    "ceiling": "same model",
}


def heat_maps(rows: Sequence[Row]) -> Figure:
    """Draw every measure between all layers of two models: X's layers up, Y's across, one colour scale from 0 to 1.

    Args:
        rows: those of one pair of models, with raw features.
    """
    measures = list(dict.fromkeys(row["label"] for row in rows))
    layers_x, layers_y = (sorted({row[f"layer_{side}"] for row in rows}) for side in "xy")
    cell = CELL if max(len(layers_x), len(layers_y)) <= 8 else SMALL_CELL
    width, height = (max(1.9, cell * len(layers)) for layers in (layers_y, layers_x))
    size = width + 0.55, height + 0.75
    figure, axes = panels(len(measures), PANELS_ABREAST, size, (1.1, 0.5), boxed=True, font=8)
    for axis, measure in zip(axes, measures, strict=True):
        cells = ((row["layer_x"], row["layer_y"], row["value"]) for row in rows if row["label"] == measure)
        grid = layer_grid(cells, layers_x, layers_y)
        image = heat_map(axis, grid, layers_x, layers_y)
        axis.set_title(measure, fontsize=9)
    figure.colorbar(image, ax=axes, shrink=0.6, pad=0.01, label="similarity")
    figure.supylabel(f"layer of {rows[0]['model_x']}", fontsize=9)
    figure.supxlabel(f"layer of {rows[0]['model_y']}", fontsize=9)
    return figure


def block_map(rows: Sequence[Row]) -> Figure:
    """Draw one measure between all layers of all models, a block for each pair, as in Wu et al. 2020, Figure 1.

    Entry (a, b) is the similarity of a to b, even if the measure is not symmetric.

    Args:
        rows: those of one measure and all pairs of models, with raw features.
    """
    layers: dict[str, list[int]] = {}
    for row in rows:
        for side in "xy":
            layers[row[f"model_{side}"]] = sorted({*layers.get(row[f"model_{side}"], []), row[f"layer_{side}"]})
    places = [(model, layer) for model, own in layers.items() for layer in own]
    room = 0.3 * len(places)
    size = min(max(3.5, room), LARGEST)
    figure, (axis,) = panels(1, 1, (size, size), (1.6, 1.0), boxed=True, font=8)
    numbers = [layer for _, layer in places]
    image = heat_map(axis, _both_directions(rows, places), numbers, numbers)
    crowded = room > LARGEST
    if crowded:  # there is no room for the numbers of layers
        axis.set(xticks=[], yticks=[])
    _name_blocks(axis, list(layers), [len(own) for own in layers.values()], crowded)
    figure.suptitle(rows[0]["measure"], fontsize=10)
    figure.colorbar(image, ax=axis, shrink=0.6, pad=0.08, label="similarity of the row's layer to the column's")
    return figure


def _both_directions(rows: Sequence[Row], places: Sequence[tuple[str, int]]) -> NDArray[np.float64]:
    """Arrange the similarity of each (model, layer) to each other; NaN where none was measured."""
    grid, number = np.full((len(places), len(places)), np.nan), {place: n for n, place in enumerate(places)}
    for row in rows:
        a, b = (number[row[f"model_{side}"], row[f"layer_{side}"]] for side in "xy")
        if row["direction"] != "backward":
            grid[a, b] = row["value"]
        if row["direction"] != "forward":
            grid[b, a] = row["value"]
    return grid


def _name_blocks(axis: Axes, names: list[str], sizes: list[int], crowded: bool) -> None:
    """Separate the models by white lines, and name them above and on the right, across their blocks if crowded."""
    ends = np.cumsum(sizes)
    for end in ends[:-1]:
        axis.axhline(end - 0.5, color="w", linewidth=1.5)
        axis.axvline(end - 0.5, color="w", linewidth=1.5)
    middles = ends - np.array(sizes) / 2 - 0.5
    above, right = axis.secondary_xaxis("top"), axis.secondary_yaxis("right")
    above.set_xticks(middles, names, rotation=90 if crowded else 0)
    right.set_yticks(middles, names, rotation=0 if crowded else 90, va="center")
    for labels in (above, right):
        labels.tick_params(length=0)


def layer_lines(rows: Sequence[Row]) -> Figure:
    """Draw every measure along matching layers: the value with its interval, and the controls that were computed.

    Args:
        rows: those of one pair of models.
    """
    raw = [row for row in rows if row["features"] == "raw"]
    measures = list(dict.fromkeys(row["label"] for row in raw))
    pairs = matching_layers(*(sorted({row[f"layer_{side}"] for row in rows}) for side in "xy"))
    figure, axes = panels(len(measures), PANELS_ABREAST, (2.5, 2.1), (1.6, 0.4), font=8, sharex=True, sharey=True)
    shown: dict[str, Any] = {}
    for axis, measure in zip(axes, measures, strict=True):
        line = _line(rows, measure, pairs)
        for name, handle in _draw(axis, line).items():
            shown.setdefault(name, handle)
        name_sites(axis, measure, pairs)
        axis.axhline(0, color="0.85", linewidth=0.8, zorder=0)
    figure.supxlabel("layer", fontsize=9)
    figure.supylabel("similarity", fontsize=9)
    with_intervals = any(row["low"] is not None for row in rows)
    said = [SAID[name] + (", 95 % interval" if name == "value" and with_intervals else "") for name in shown]
    figure.legend(list(shown.values()), said, loc="outside right center", frameon=False)
    figure.suptitle(f"{rows[0]['model_x']} and {rows[0]['model_y']}", fontsize=10)
    return figure


def pair_lines(panels_of_pairs: Sequence[Sequence[Row]]) -> Figure:
    """Draw every measure along matching layers, a thin line for each pair of models and a thick one for their median.

    Pairs of other depths are stretched to the deepest.

    Args:
        panels_of_pairs: the rows of each pair of two models.
    """
    lines: dict[str, list[NDArray[np.float64]]] = {}
    named: set[tuple[str, ...]] = set()
    for rows in panels_of_pairs:
        pairs = matching_layers(*(sorted({row[f"layer_{side}"] for row in rows}) for side in "xy"))
        named.add(tuple(site_name(pair) for pair in pairs))
        for measure in dict.fromkeys(row["label"] for row in rows if row["features"] == "raw"):
            lines.setdefault(measure, []).append(_line(rows, measure, pairs)["value"])
    most = max(len(names) for names in named)
    figure, axes = panels(len(lines), PANELS_ABREAST, (2.5, 2.1), (0.6, 0.4), font=8, sharex=True, sharey=True)
    for axis, (measure, each) in zip(axes, lines.items(), strict=True):
        stretched = np.array([np.interp(np.linspace(0, 1, most), np.linspace(0, 1, len(one)), one) for one in each])
        axis.plot(stretched.T, color="0.6", linewidth=0.5, alpha=0.5)
        axis.plot(np.nanmedian(stretched, 0), **LINES["value"], markersize=3.5)
        axis.set_title(measure, fontsize=9)
        axis.axhline(0, color="0.85", linewidth=0.8, zorder=0)
        if len(named) == 1:
            axis.set_xticks(range(most), next(iter(named)))
    figure.supxlabel("layer" if len(named) == 1 else "layer of the deepest pair; the others stretched", fontsize=9)
    figure.supylabel("similarity", fontsize=9)
    figure.suptitle(f"{len(panels_of_pairs)} pairs of models, and their median", fontsize=10)
    return figure


def _line(rows: Sequence[Row], measure: str, pairs: list[tuple[int, int]]) -> dict[str, NDArray[np.float64]]:
    """Return each quantity along the matching layers; NaN where it is missing."""
    by_place = {
        (row["layer_x"], row["layer_y"], row["features"]): row for row in rows if row["label"] == measure
    }  # fmt: skip

    def along(column: str, features: str = "raw") -> NDArray[np.float64]:
        cells = [by_place.get((*pair, features), {}).get(column) for pair in pairs]
        return np.array([np.nan if cell is None else cell for cell in cells], dtype=float)

    line = {name: along(name) for name in ("value", "low", "high", "held_out", "null", "untrained", "ceiling")}
    return {**line, "standardised": along("value", "standardised")}


def _draw(axis: Axes, line: dict[str, NDArray[np.float64]]) -> dict[str, Any]:
    """Draw the quantities that have values, and return their handles by name."""
    places = np.arange(len(line["value"]))
    if np.isfinite(line["low"]).any():
        axis.fill_between(places, line["low"], line["high"], color=LINES["value"]["color"], alpha=0.2, linewidth=0)
    return {
        name: axis.plot(places, line[name], markersize=3.5, **style)[0]
        for name, style in LINES.items()
        if np.isfinite(line[name]).any()
    }
