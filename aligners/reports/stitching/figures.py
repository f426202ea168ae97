"""Figures of stitching: its cost at each site, during training, and over all site pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aligners.reports.drawing import (
    ABREAST,
    LINEAR_UP_TO,
    MODEL_COLOURS,
    PANEL,
    Look,
    SitePanel,
    dress,
    heat_map,
    layer_grid,
    line_look,
    number,
    panels,
    penalty_scale,
    shared_out,
    site_figure,
)
from aligners.reports.names import site_name
from aligners.reports.report import Row
from aligners.reports.stitching.lines import (
    Line,
    averaged,
    is_grid,
    lines_of,
    matching_pairs,
    methods_of,
    what_intervals_are,
)
from aligners.reports.words import score_words

__all__ = ["accuracy_figure", "curve_figure", "penalty_figure", "penalty_map"]

Groups = Mapping[str, Sequence[str]] | None
PENALTY = "penalty: stitched minus native loss, nats"


def penalty_figure(rows: Sequence[Row], groups: Groups = None) -> Figure:
    """Draw penalty against site, a panel for each method and a line for each route (Brown et al. 2023, Figure 1).

    Where a panel would have more than six lines, models stitched to themselves have their own. Colours are targets,
    markers are sources, dashed lines are models stitched to themselves.

    Args:
        rows: of all routes.
        groups: see `pair_intervals.over_pairs`; with groups, or many models, lines are means over routes.
    """
    return _by_site(rows, groups, "penalty", PENALTY)


def accuracy_figure(rows: Sequence[Row], groups: Groups = None) -> Figure:
    """Draw the task's score against site, below the target's own; for groups, how much of it is lost.

    Args:
        rows: of all routes.
        groups: see `penalty_figure`.
    """
    if averaged(rows, groups):
        zero: Look = {"color": "0.6", "linewidth": 0.8}
        return _by_site(rows, groups, "score_penalty", f"lost {score_words(rows)}", 100, [(None, zero, 0)])
    natives = {row["model_y"]: row["score"] for row in rows if row["method"] == "native"}
    lines = lines_of(rows, groups)
    looks = _looks(lines)
    colours = {line.model_y: looks[line.name]["color"] for line in lines}
    thin: Look = {"linewidth": 0.8, "alpha": 0.6}
    levels = [(None, {"color": colours[name], **thin}, natives[name]) for name in colours.keys() & natives.keys()]
    return _by_site(rows, groups, "score", f"{score_words(rows)}; thin: the target by itself", 100, levels)


def _by_site(
    rows: Sequence[Row],
    groups: Groups,
    column: str,
    up: str,
    scale: float = 1,
    levels: Sequence[tuple[str | None, Look, float]] = (),
) -> Figure:
    """Draw a column of the rows against site: a panel for each method, all with the same levels."""
    lines, pairs = lines_of(rows, groups), matching_pairs(rows)
    looks, shown = _looks(lines), []
    for method, (aside, share) in product(methods_of(rows), _shares(lines)):
        drawn = []
        for line in share:
            cells = {(row["site_x"], row["site_y"]): row for row in line.rows if row["method"] == method}
            drawn.append((line.name, looks[line.name], [cells.get(pair) for pair in pairs]))
        shown.append(SitePanel(method + aside, pairs, drawn, levels))
    across = "site (matching layers)" if is_grid(rows) else "site (layer)"
    note = f"bars: {what_intervals_are(rows, groups)}"
    return site_figure(shown, column, up, scale, across, note)


def curve_figure(curves: Sequence[Row], groups: Groups = None) -> Figure:
    """Draw the penalty of one method on validation texts during training (Brown et al. 2023, Figure 6).

    Each site has a panel, or several where lines are many; each route, or the mean over each group, has a line.

    Args:
        curves: rows with step, model_x, model_y, method, site_x, site_y and penalty.
        groups: see `penalty_figure`.
    """
    lines = lines_of(curves, groups, quantities=("penalty",), by=("site_x", "site_y", "step"))
    looks, parts = _looks(lines), list(product(matching_pairs(curves), _shares(lines)))
    figure, axes = panels(len(parts), ABREAST, PANEL, (2.0, 0.6), sharey=True)
    for (pair, (aside, share)), axis in zip(parts, axes, strict=True):
        for line in share:
            here = [row for row in line.rows if (row["site_x"], row["site_y"]) == pair]
            points = sorted((row["step"], number(row["penalty"])) for row in here)
            if points:
                axis.plot(
                    *zip(*points, strict=True), label=line.name, **looks[line.name], markevery=-(-len(points) // 12)
                )
        axis.set_title(f"site {site_name(pair)}{aside}", fontsize=10)
    penalty_scale(axes)
    dress(figure, axes, "step", PENALTY)
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


def _shares(lines: Sequence[Line]) -> list[tuple[str, list[Line]]]:
    """Share lines out to panels; with each share, what its panel's title says of it besides."""
    by_name = {line.name: line for line in lines}
    between, itself = ([line.name for line in lines if line.same == same] for same in (False, True))
    shares = [[by_name[name] for name in names] for names in shared_out([between, itself])]
    return [
        (", each into itself" if len(shares) > 1 and all(line.same for line in share) else "", share)
        for share in shares
    ]


def _looks(lines: Sequence[Line]) -> dict[str, Look]:
    """Give targets colours, sources markers, and groups both; models stitched to themselves are dashed."""
    targets = list(dict.fromkeys(line.model_y or line.name for line in lines))
    sources = list(dict.fromkeys(line.model_x or line.name for line in lines))
    return {
        line.name: line_look(
            targets.index(line.model_y or line.name),
            sources.index(line.model_x or line.name),
            "--" if line.same else "-",
            MODEL_COLOURS,
        )
        for line in lines
    }
