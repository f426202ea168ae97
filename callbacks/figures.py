"""Figures of a report: error and accuracy, site by site."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["accuracy_figure", "fvu_figure", "save_figure"]

# Okabe and Ito's colours, which colour-blind readers can tell apart, then grey for floors.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
MARKERS = "osD^vPX*"


def fvu_figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """FVU against site, one line for each method, one panel for each direction; logarithmic."""
    figure, axes = _panels(rows)
    for axis, (title, panel) in zip(axes, _directions(rows), strict=True):
        for name, style, line in _lines(panel):
            axis.plot(range(len(line)), [row["fvu"] for row in line], label=name, **style)
        axis.axhline(1, color="0.6", linewidth=0.8, zorder=0)
        axis.set_yscale("log")
        _label(axis, title, _sites(panel), "FVU: share of variance left unexplained")
    _legend(axes[-1])
    return figure


def accuracy_figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """Accuracy after injection against site, with intervals, between the ceiling and the floors."""
    figure, axes = _panels(rows)
    for axis, (title, panel) in zip(axes, _directions(rows), strict=True):
        lines = _lines(panel)
        for number, (name, style, line) in enumerate(lines):
            places = [place + 0.06 * (number - (len(lines) - 1) / 2) for place in range(len(line))]
            low = [100 * (row["accuracy"] - row["accuracy_low"]) for row in line]
            high = [100 * (row["accuracy_high"] - row["accuracy"]) for row in line]
            heights = [100 * row["accuracy"] for row in line]
            axis.errorbar(places, heights, yerr=[low, high], label=name, elinewidth=0.8, **style)
        for row in panel:
            if row["site_x"] is None and row["accuracy"] is not None:
                solid = row["role"] == "ceiling"
                axis.axhline(
                    100 * row["accuracy"],
                    color="0.3",
                    linestyle="-" if solid else ":",
                    linewidth=0.9,
                    zorder=0,
                )
                axis.annotate(
                    row["method"], (1, 100 * row["accuracy"]), xycoords=("axes fraction", "data"), fontsize=7,
                    color="0.3", ha="right", va="bottom",
                )  # fmt: skip
        _label(axis, title, _sites(panel), "task accuracy after injection, %")
    _legend(axes[-1])
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG, whole or not at all."""
    half = path.with_suffix(".part.png")
    figure.savefig(half, dpi=130)
    half.replace(path)


def _panels(rows: Sequence[dict[str, Any]]) -> tuple[Figure, list[Axes]]:
    count = len(_directions(rows))
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}):
        figure = Figure(figsize=(4.6 * count + 1.9, 4.2), layout="constrained")
        axes = figure.subplots(1, count, sharey=True, squeeze=False)
    return figure, list(axes[0])


def _directions(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Rows of each pair (from, into), in the order in which they first come."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        panels.setdefault(f"{row['model_x']} → {row['model_y']}", []).append(row)
    return list(panels.items())


def _lines(panel: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """(name, style, rows by site) of every method that has sites; floors dotted and grey."""
    names = list(dict.fromkeys(row["method"] for row in panel if row["site_x"] is not None))
    lines: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = []
    colour = 0
    for name in names:
        line = [row for row in panel if row["method"] == name]
        style: dict[str, Any] = {"markersize": 4.5, "linewidth": 1.3}
        if line[0]["role"] == "floor":
            style |= {"color": "0.6", "linestyle": ":", "marker": MARKERS[-1 - len(lines) % len(MARKERS)]}
        else:
            style |= {"color": COLOURS[colour % len(COLOURS)], "marker": MARKERS[colour % len(MARKERS)]}
            colour += 1
        lines.append((name, style, line))
    return lines


def _sites(panel: list[dict[str, Any]]) -> list[str]:
    pairs = dict.fromkeys((row["site_x"], row["site_y"]) for row in panel if row["site_x"] is not None)
    return [str(i) if i == j else f"{i}→{j}" for i, j in pairs]


def _label(axis: Axes, title: str, sites: list[str], height: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xticks(range(len(sites)), sites)
    axis.set_xlabel("site (layer)")
    if axis.get_subplotspec().is_first_col():  # type: ignore[union-attr]
        axis.set_ylabel(height)


def _legend(axis: Axes) -> None:
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
