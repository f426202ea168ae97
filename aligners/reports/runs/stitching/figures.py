"""The lines of a stitching report (routes, or means over the routes of groups), and its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aligners.injection.scoring.pair_intervals import over_pairs
from aligners.reports import drawing
from aligners.reports.names import score_words, short_names, site_name
from aligners.reports.report import Row, grouped, site_pairs
from aligners.similarity.controls import matching_layers

Pair = tuple[int, int]
ROUTE = ("model_x", "model_y")
MOST_MODELS = 3  # more routes than theirs cannot be told apart in a panel
Groups = Mapping[str, Sequence[str]] | None
PENALTY = "penalty: stitched minus native loss, nats"


class Line(NamedTuple):
    """One line of a figure or table.

    Attributes:
        name: `X → Y`, or the name of a group.
        model_x: the source; None for a group.
        model_y: the target; None for a group.
        same: whether models are stitched to themselves.
        rows: those of all methods and site pairs; a route also has "native".
    """

    name: str
    model_x: str | None
    model_y: str | None
    same: bool
    rows: list[Row]


def averaged(rows: Sequence[Row], groups: Mapping[str, Sequence[str]] | None) -> bool:
    """Tell whether lines are means over routes: with groups, or with too many models to tell routes apart."""
    return groups is not None or len({row[f"model_{side}"] for row in rows for side in "xy"}) > MOST_MODELS


def lines_of(
    rows: Sequence[Row], groups: Mapping[str, Sequence[str]] | None = None, **averaging: Sequence[str]
) -> list[Line]:
    """Turn rows into lines; models stitched to themselves come last.

    Args:
        rows: of all routes.
        groups: as in `over_pairs`.
        averaging: other arguments of `over_pairs`.
    """
    if averaged(rows, groups):
        means = grouped(over_pairs(rows, groups, **averaging), "group")
        lines = [Line(name, None, None, name == "same model", own) for name, own in means.items()]
    else:
        names, routes = short_names(row[f"model_{side}"] for row in rows for side in "xy"), grouped(rows, *ROUTE)
        lines = [Line(f"{names[x]} → {names[y]}", x, y, x == y, own) for (x, y), own in routes.items()]
    return sorted(lines, key=lambda line: line.same)


def methods_of(rows: Sequence[Row]) -> list[str]:
    """List the methods that have sites, floors last."""
    roles = {row["method"]: row["role"] for row in rows if row["site_x"] is not None}
    return sorted(roles, key=lambda method: roles[method] == "floor")


def is_grid(rows: Sequence[Row]) -> bool:
    """Tell whether some route pairs a site of its source with more than one site of its target."""
    return any(len(own) > max(map(len, _depths(own))) for own in _pairs(rows))


def matching_pairs(rows: Sequence[Row]) -> list[Pair]:
    """Return the site pairs of all routes by depth; of a grid, only those of equal relative depth."""
    along: set[Pair] = set()
    for own in _pairs(rows):
        depths = _depths(own)
        along |= set(own) & set(matching_layers(*depths)) if len(own) > max(map(len, depths)) else set(own)
    return sorted(along, key=lambda pair: (sum(pair), pair))


def _depths(pairs: Sequence[Pair]) -> tuple[list[int], list[int]]:
    """The sites of the source, and of the target."""
    return sorted({i for i, _ in pairs}), sorted({j for _, j in pairs})


def what_intervals_are(rows: Sequence[Row], groups: Mapping[str, Sequence[str]] | None = None) -> str:
    """Say in words what the lines' intervals are taken over."""
    if not averaged(rows, groups):
        return "95 % interval over texts"
    return " or ".join(sorted({row["interval"] for line in lines_of(rows, groups) for row in line.rows}))


def _pairs(rows: Sequence[Row]) -> list[list[Pair]]:
    """Return the site pairs of each route or group."""
    return [pairs for own in grouped(rows, "group", *ROUTE).values() if (pairs := site_pairs(own))]


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
        zero: drawing.Look = {"color": "0.6", "linewidth": 0.8}
        return _by_site(rows, groups, "score_penalty", f"lost {score_words(rows)}", 100, [(None, zero, 0)])
    natives = {row["model_y"]: row["score"] for row in rows if row["method"] == "native"}
    lines = lines_of(rows, groups)
    looks = _looks(lines)
    colours = {line.model_y: looks[line.name]["color"] for line in lines}
    thin: drawing.Look = {"linewidth": 0.8, "alpha": 0.6}
    levels = [(None, {"color": colours[name], **thin}, natives[name]) for name in colours if name in natives]
    return _by_site(rows, groups, "score", f"{score_words(rows)}; thin: the target by itself", 100, levels)


def _by_site(
    rows: Sequence[Row],
    groups: Groups,
    column: str,
    up: str,
    scale: float = 1,
    levels: Sequence[tuple[str | None, drawing.Look, float]] = (),
) -> Figure:
    """Draw a column of the rows against site: a panel for each method, all with the same levels."""
    lines, pairs = lines_of(rows, groups), matching_pairs(rows)
    looks, shown = _looks(lines), []
    for method, (aside, share) in product(methods_of(rows), _shares(lines)):
        drawn = []
        for line in share:
            cells = {(row["site_x"], row["site_y"]): row for row in line.rows if row["method"] == method}
            drawn.append((line.name, looks[line.name], [cells.get(pair) for pair in pairs]))
        shown.append(drawing.SitePanel(method + aside, pairs, drawn, levels))
    across = "site (matching layers)" if is_grid(rows) else "site (layer)"
    note = f"bars: {what_intervals_are(rows, groups)}"
    return drawing.site_figure(shown, column, up, scale, across, note)


def curve_figure(curves: Sequence[Row], groups: Groups = None) -> Figure:
    """Draw the penalty of one method on validation texts during training (Brown et al. 2023, Figure 6).

    Each site has a panel, or several where lines are many; each route, or the mean over each group, has a line.

    Args:
        curves: rows with step, model_x, model_y, method, site_x, site_y and penalty.
        groups: see `penalty_figure`.
    """
    lines = lines_of(curves, groups, quantities=("penalty",), by=("site_x", "site_y", "step"))
    looks, parts = _looks(lines), list(product(matching_pairs(curves), _shares(lines)))
    figure, axes = drawing.panels(len(parts), drawing.ABREAST, drawing.PANEL, (2.0, 0.6), sharey=True)
    for (pair, (aside, share)), axis in zip(parts, axes, strict=True):
        for line in share:
            here = [row for row in line.rows if (row["site_x"], row["site_y"]) == pair]
            points = sorted((row["step"], drawing.number(row["penalty"])) for row in here)
            if points:
                axis.plot(
                    *zip(*points, strict=True), label=line.name, **looks[line.name], markevery=-(-len(points) // 12)
                )
        axis.set_title(f"site {site_name(pair)}{aside}", fontsize=10)
    drawing.penalty_scale(axes)
    drawing.dress(figure, axes, "step", PENALTY)
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
    figure, axes = drawing.panels(len(methods) * count, count, size, (1.3, 0.4), boxed=True, font=8)
    for place, method in enumerate(methods):
        across = axes[place * count : (place + 1) * count]
        _map_row(figure, across, [[r for r in line.rows if r["method"] == method] for line in lines], layers)
        across[0].set_ylabel(method, fontsize=9)
    for axis, line in zip(axes, lines, strict=False):
        axis.set_title(line.name, fontsize=9)
    drawing.label(figure, "site of the target", "site of the source")
    return figure


def _map_row(figure: Figure, axes: list[Axes], lines: Sequence[Sequence[Row]], layers: list[list[int]]) -> None:
    """Draw the penalties of one method, a panel for each line, with one scale."""
    grids = [drawing.layer_grid(((r["site_x"], r["site_y"], r["penalty"]) for r in rows), *layers) for rows in lines]
    known = np.concatenate([grid[np.isfinite(grid)] for grid in grids])
    low, high = (0.0, 1.0) if not known.size else (min(0.0, float(known.min())), float(known.max()))
    for axis, grid in zip(axes, grids, strict=True):
        image = drawing.heat_map(axis, grid, layers[0], layers[1], low, max(high, drawing.LINEAR_UP_TO))
    figure.colorbar(image, ax=axes, shrink=0.8, pad=0.01, label="penalty, nats")


def _shares(lines: Sequence[Line]) -> list[tuple[str, list[Line]]]:
    """Share lines out to panels; with each share, what its panel's title says of it besides."""
    by_name = {line.name: line for line in lines}
    between, itself = ([line.name for line in lines if line.same == same] for same in (False, True))
    shares = [[by_name[name] for name in names] for names in drawing.shared_out([between, itself])]
    return [
        (", each into itself" if len(shares) > 1 and all(line.same for line in share) else "", share)
        for share in shares
    ]


def _looks(lines: Sequence[Line]) -> dict[str, drawing.Look]:
    """Give targets colours, sources markers, and groups both; models stitched to themselves are dashed."""
    targets = list(dict.fromkeys(line.model_y or line.name for line in lines))
    sources = list(dict.fromkeys(line.model_x or line.name for line in lines))
    looks = {}
    for line in lines:
        colour, marker = targets.index(line.model_y or line.name), sources.index(line.model_x or line.name)
        looks[line.name] = drawing.line_look(colour, marker, "--" if line.same else "-", drawing.MODEL_COLOURS)
    return looks
