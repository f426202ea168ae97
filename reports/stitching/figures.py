"""Figures of stitching: what it costs at each site, during training, and over all site pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reports.drawing import (
    LINEAR_UP_TO,
    Look,
    heat_map,
    layer_grid,
    line_look,
    lines_by_site,
    number,
    panels,
    penalty_scale,
    shown_lines,
)
from reports.names import site_name
from reports.report import Row
from reports.stitching.lines import Line, averaged, is_grid, lines_of, matching_pairs, methods_of, what_intervals_are
from reports.words import score_words

__all__ = ["accuracy_figure", "curve_figure", "penalty_figure", "penalty_map"]

Groups = Mapping[str, Sequence[str]] | None
PANELS_ABREAST = 4
PENALTY = "penalty: stitched minus native loss, nats"


def penalty_figure(rows: Sequence[Row], groups: Groups = None) -> Figure:
    """Draw penalty against site, a panel for each method and a line for each route (Brown et al. 2023, Figure 1).

    Colours are targets, markers are sources, dashed lines are models stitched to themselves.

    Args:
        rows: of all routes.
        groups: see `pair_intervals.over_pairs`; with groups or many models lines are means over routes.
    """
    figure, axes = _by_site(rows, groups, "penalty", 1, PENALTY)
    for axis in axes:
        penalty_scale(axis)
    return figure


def accuracy_figure(rows: Sequence[Row], groups: Groups = None) -> Figure:
    """Draw the task's score against site, below the target's own; for groups, how much of it is lost.

    Args:
        rows: of all routes.
        groups: see `penalty_figure`.
    """
    if averaged(rows, groups):
        figure, axes = _by_site(rows, groups, "score_penalty", 100, f"lost {score_words(rows)}")
        for axis in axes:
            axis.axhline(0, color="0.6", linewidth=0.8, zorder=0)
        return figure
    figure, axes = _by_site(rows, groups, "score", 100, f"{score_words(rows)}; thin: the target by itself")
    natives = {row["model_y"]: row["score"] for row in rows if row["method"] == "native"}
    lines = lines_of(rows, groups)
    colours = {line.model_y: look["color"] for line, look in zip(lines, _looks(lines), strict=True)}
    for axis in axes:
        for target in colours.keys() & natives.keys():
            axis.axhline(100 * natives[target], color=colours[target], linewidth=0.8, alpha=0.6, zorder=0)
    return figure


def _by_site(rows: Sequence[Row], groups: Groups, column: str, scale: float, height: str) -> tuple[Figure, list[Axes]]:
    """Draw a column of the rows against site with its intervals, a panel for each method."""
    lines, pairs = lines_of(rows, groups), matching_pairs(rows)
    figure, axes = _panels(methods_of(rows))
    for method, axis in axes.items():
        drawn = []
        for line, look in zip(lines, _looks(lines), strict=True):
            cells = {(row["site_x"], row["site_y"]): row for row in line.rows if row["method"] == method}
            drawn.append((line.name, look, [cells.get(pair) for pair in pairs]))
        lines_by_site(axis, drawn, column, scale)
        axis.set_xticks(range(len(pairs)), [site_name(pair) for pair in pairs])
    across = "site (matching layers)" if is_grid(rows) else "site (layer)"
    _dress(figure, axes.values(), across, height, f"bars: {what_intervals_are(rows, groups)}")
    return figure, list(axes.values())


def curve_figure(curves: Sequence[Row], groups: Groups = None) -> Figure:
    """Draw the penalty of one method on validation texts during training (Brown et al. 2023, Figure 6).

    There is a panel for each site, and a line for each route or for the mean over a group.

    Args:
        curves: step, model_x, model_y, method, site_x, site_y, penalty.
        groups: see `penalty_figure`.
    """
    lines = lines_of(curves, groups, quantities=("penalty",), by=("site_x", "site_y", "step"))
    pairs = matching_pairs(curves)
    figure, axes = _panels([f"site {site_name(pair)}" for pair in pairs])
    for pair, axis in zip(pairs, axes.values(), strict=True):
        for line, look in zip(lines, _looks(lines), strict=True):
            here = [row for row in line.rows if (row["site_x"], row["site_y"]) == pair]
            points = sorted((row["step"], number(row["penalty"])) for row in here)
            if points:
                axis.plot(*zip(*points, strict=True), label=line.name, **look, markevery=-(-len(points) // 12))
        penalty_scale(axis)
    _dress(figure, axes.values(), "step", PENALTY, "")
    figure.suptitle(curves[0]["method"], fontsize=10)
    return figure


def penalty_map(rows: Sequence[Row], groups: Groups = None) -> Figure:
    """Draw penalty over all site pairs: a row of panels with one scale for each method, a column for each route.

    Args:
        rows: of all routes.
        groups: see `penalty_figure`.
    """
    lines, methods = lines_of(rows, groups), methods_of(rows)
    layers = [sorted({row[f"site_{side}"] for row in rows if row["site_x"] is not None}) for side in "xy"]
    height, width = (max(1.9, 0.42 * len(own)) for own in layers)
    count, size = len(lines), (width + 0.45, height + 0.7)
    figure, axes = panels(len(methods) * count, count, size, (1.3, 0.4), boxed=True, font=8)
    for place, method in enumerate(methods):
        across = axes[place * count : (place + 1) * count]
        _map_row(figure, across, [[r for r in line.rows if r["method"] == method] for line in lines], layers)
        across[0].set_ylabel(method, fontsize=9)
    for axis, line in zip(axes, lines, strict=False):
        axis.set_title(line.name, fontsize=9)
    figure.supylabel("site of the source", fontsize=9)
    figure.supxlabel("site of the target", fontsize=9)
    return figure


def _map_row(figure: Figure, axes: list[Axes], lines: Sequence[Sequence[Row]], layers: list[list[int]]) -> None:
    """Draw the penalties of one method, a panel for each line, with one scale."""
    grids = [layer_grid(((r["site_x"], r["site_y"], r["penalty"]) for r in rows), *layers) for rows in lines]
    known = np.concatenate([grid[np.isfinite(grid)] for grid in grids])
    low, high = (0.0, 1.0) if not known.size else (min(0.0, float(known.min())), float(known.max()))
    for axis, grid in zip(axes, grids, strict=True):
        image = heat_map(axis, grid, layers[0], layers[1], low, max(high, LINEAR_UP_TO))
    figure.colorbar(image, ax=axes, shrink=0.8, pad=0.01, label="penalty, nats")


def _panels(titles: Sequence[str]) -> tuple[Figure, dict[str, Axes]]:
    figure, axes = panels(len(titles), PANELS_ABREAST, (3.3, 2.9), (2.0, 0.6), sharey=True)
    for title, axis in zip(titles, axes, strict=True):
        axis.set_title(title, fontsize=10)
    return figure, dict(zip(titles, axes, strict=True))


def _looks(lines: Sequence[Line]) -> list[Look]:
    """Colours are targets and markers are sources; a group has its own. Dashed: models stitched to themselves."""
    targets = list(dict.fromkeys(line.model_y or line.name for line in lines))
    sources = list(dict.fromkeys(line.model_x or line.name for line in lines))
    return [
        line_look(
            targets.index(line.model_y or line.name),
            sources.index(line.model_x or line.name),
            "--" if line.same else "-",
        )
        for line in lines
    ]


def _dress(figure: Figure, axes: Iterable[Axes], across: str, up: str, note: str) -> None:
    """Name the axes, and add one legend for all panels."""
    figure.supxlabel(across, fontsize=9)
    figure.supylabel(up, fontsize=9)
    handles, names = shown_lines(axes)
    look: dict[str, Any] = {"frameon": False, "fontsize": 8, "title": note or None, "title_fontsize": 7.5}
    figure.legend(handles, names, loc="outside right center", **look)
