"""The report of stitching: penalties and scores by route, method and site pair."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, product
from operator import itemgetter
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aligners.fitting.training_status import mark, what_did_not_train
from aligners.injection.scoring.pair_intervals import over_pairs
from aligners.reports import drawing
from aligners.reports.names import (
    score_heading,
    score_words,
    site_name,
    site_names,
    with_interval,
    with_short_names,
)
from aligners.reports.report import (
    Report,
    Row,
    by_sites,
    distinct,
    grouped,
    known,
    models_in,
    number,
    numbers,
    site_pairs,
    values,
    where,
)
from aligners.reports.runs.stitching_words import lead, method_words
from aligners.reports.screen import SiteTable
from aligners.similarity.controls import matching_layers

Groups = Mapping[str, Sequence[str]] | None
MOST_MODELS = 3  # more routes than theirs cannot be told apart in a panel
MOST_MARKERS = 12  # along a learning curve
PENALTY = "penalty: stitched minus native loss, nats"


def report(
    meta: Row, rows: Sequence[Row], curves: Sequence[Row] = (), groups: Groups = None
) -> Report:
    """Make the report from rows and learning curves.

    Args:
        meta: what holds for all rows.
        rows: one for each route, method and site pair, and one "native" for each route.
        curves: one for each route, method, site pair and step.
        groups: groups of models. With groups, or many models, means over pairs of models are shown.
    """
    shown = with_short_names(rows)
    routes = Routes(rows, groups)
    pairs: list[Row] = []
    if routes.averaged:
        pairs = over_pairs(rows, groups)
    findings = []
    for method in routes.methods:
        findings += method_words(
            where(shown, method=method), directions=not routes.averaged
        )
    return Report(
        "stitching",
        meta,
        rows,
        {"pairs": pairs, "curves": curves},
        figures=_figures(routes, curves, groups),
        screen=[_table(routes, method) for method in routes.methods],
        note=f"±: half of the {routes.intervals}",
        lead=lead(meta, shown),
        sentences=findings + what_did_not_train(shown),
    )


class Line(NamedTuple):
    """One line of a figure or table.

    Attributes:
        name: `X → Y`, or the name of a group.
        model_x: the source; the name of a group.
        model_y: the target; the name of a group.
        same: whether models are stitched to themselves.
        rows: those of all methods and site pairs; a route also has "native".
    """

    name: str
    model_x: str
    model_y: str
    same: bool
    rows: list[Row]


class Routes:
    """The rows of all routes, and the lines that show them.

    Args:
        rows: rows of all routes.
        groups: groups of models, as in `over_pairs`.
        averaging: other arguments of `over_pairs`.

    Attributes:
        averaged: whether lines are means over routes: with groups, or too many models to tell routes apart.
        lines: a line for each route, or for each group; models stitched to themselves come last.
        pairs: the site pairs of all routes by depth; of a grid, only those of equal relative depth.
        is_grid: whether some route pairs a site of its source with more than one site of its target.
    """

    def __init__(
        self, rows: Sequence[Row], groups: Groups = None, **averaging: Any
    ) -> None:
        self.rows = rows
        self.averaged = groups is not None or len(set(models_in(rows))) > MOST_MODELS
        lines = []
        if self.averaged:
            for name, line in grouped(
                over_pairs(rows, groups, **averaging), "group"
            ).items():
                lines.append(Line(name, name, name, name == "same model", line))
        else:
            for (x, y), line in grouped(
                with_short_names(rows), "model_x", "model_y"
            ).items():
                lines.append(Line(f"{x} → {y}", x, y, x == y, line))
        self.lines = sorted(lines, key=lambda line: line.same)
        self.pairs, self.is_grid = _matching(rows)

    @property
    def methods(self) -> list[str]:
        """The methods that have sites, floors last."""
        roles = {row["method"]: row["role"] for row in known(self.rows, "site_x")}
        return sorted(roles, key=lambda method: roles[method] == "floor")

    @property
    def intervals(self) -> str:
        """What the intervals of lines cover, in words."""
        if not self.averaged:
            return "95 % interval over texts"
        every: set[str] = set()
        for line in self.lines:
            every.update(values(line.rows, "interval"))
        return " or ".join(sorted(every))

    @property
    def looks(self) -> dict[str, drawing.Look]:
        """Looks of lines: colours for targets, markers for sources, both for groups; dashed for self-stitching."""
        targets = list(dict.fromkeys(line.model_y for line in self.lines))
        sources = list(dict.fromkeys(line.model_x for line in self.lines))
        looks = {}
        for line in self.lines:
            colour = targets.index(line.model_y)
            marker = sources.index(line.model_x)
            looks[line.name] = drawing.line_look(
                colour, marker, "-", drawing.MODEL_COLOURS
            )
            if line.same:
                looks[line.name]["linestyle"] = "--"
        return looks

    def shares(self) -> list[tuple[str, list[Line]]]:
        """Share out lines to panels; each share comes with an addition to its panel's title."""
        between = [line for line in self.lines if not line.same]
        panels = drawing.shared_out([between, self.lines[len(between) :]])
        shares = []
        for lines in panels:
            alone = len(panels) > 1 and lines[0].same
            aside = ", each into itself" if alone else ""
            shares.append((aside, lines))
        return shares


def _matching(rows: Sequence[Row]) -> tuple[list[tuple[int, int]], bool]:
    """Return the site pairs to show, by depth, and whether there are more in a grid."""
    shown: set[tuple[int, int]] = set()
    is_grid = False
    for route in grouped(known(rows, "site_x"), "model_x", "model_y").values():
        pairs = site_pairs(route)
        depths = sorted(distinct(route, "site_x")), sorted(distinct(route, "site_y"))
        if len(pairs) > max(map(len, depths)):
            pairs = [pair for pair in matching_layers(*depths) if pair in pairs]
            is_grid = True
        shown.update(pairs)
    return sorted(shown, key=lambda pair: (sum(pair), pair)), is_grid


# ---------------------------------------------------------------------- figures


def _figures(
    routes: Routes, curves: Sequence[Row], groups: Groups
) -> dict[str, Callable[[], Figure]]:
    figures: dict[str, Callable[[], Figure]] = {
        "penalty": partial(_by_site, routes, "penalty", PENALTY),
        "accuracy": partial(_accuracy_figure, routes),
    }
    if routes.is_grid:
        figures["map"] = partial(_penalty_map, routes)
    methods = grouped(curves, "method")
    for method, line in methods.items():
        name = "curves" if len(methods) == 1 else f"curves_{method}"
        figures[name] = partial(_curve_figure, line, groups)
    return figures


def _accuracy_figure(routes: Routes) -> Figure:
    """Draw the task's score against site, below the target's own; for means over routes, how much of it is lost."""
    words = score_words(routes.rows)
    if routes.averaged:
        zero: drawing.Level = (None, {"color": "0.6", "linewidth": 0.8}, 0)
        return _by_site(routes, "score_penalty", f"lost {words}", 100, [zero])
    natives: dict[str, drawing.Level] = {}
    for line in routes.lines:
        look = {
            "color": routes.looks[line.name]["color"],
            "linewidth": 0.8,
            "alpha": 0.6,
        }
        for row in where(line.rows, method="native"):
            natives[line.model_y] = (None, look, number(row["score"]))
    up = f"{words}; thin: the target by itself"
    return _by_site(routes, "score", up, 100, list(natives.values()))


def _by_site(
    routes: Routes,
    column: str,
    up: str,
    scale: float = 1,
    levels: Sequence[drawing.Level] = (),
) -> Figure:
    """Draw a column against site, a line for each route (Brown et al. 2023, Figure 1).

    Each method has a panel, or several where lines are many, with the same levels.
    """
    pairs = routes.pairs
    looks = routes.looks
    panels = []
    for method, (aside, share) in product(routes.methods, routes.shares()):
        lines = []
        for line in share:
            cells = by_sites(where(line.rows, method=method))
            lines.append((line.name, looks[line.name], list(map(cells.get, pairs))))
        panels.append(drawing.SitePanel(method + aside, pairs, lines, levels))
    across = "site (layer)"
    if routes.is_grid:
        across = "site (matching layers)"
    return drawing.site_figure(
        panels, column, up, scale, across, f"bars: {routes.intervals}"
    )


def _curve_figure(curves: Sequence[Row], groups: Groups) -> Figure:
    """Draw the penalty of one method on validation texts during training (Brown et al. 2023, Figure 6)."""
    routes = Routes(
        curves, groups, quantities=("penalty",), by=("site_x", "site_y", "step")
    )
    parts = list(product(routes.pairs, routes.shares()))
    figure, axes = drawing.panels(
        len(parts), drawing.ABREAST, drawing.PANEL, (2.0, 0.6), sharey=True
    )
    for (pair, (aside, share)), axis in zip(parts, axes, strict=True):
        for line in share:
            points = where(line.rows, site_x=pair[0], site_y=pair[1])
            if points:
                _draw_curve(axis, points, line.name, routes.looks[line.name])
        axis.set_title(f"site {site_name(pair)}{aside}", fontsize=10)
    drawing.penalty_scale(axes)
    drawing.dress(figure, axes, "step", PENALTY)
    figure.suptitle(curves[0]["method"], fontsize=10)
    return figure


def _ends(costs: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a scale of penalties."""
    if not costs:
        return 0.0, 1.0
    return min(0.0, *costs), max(drawing.LINEAR_UP_TO, *costs)


def _draw_curve(
    axis: Axes, points: Sequence[Row], name: str, look: drawing.Look
) -> None:
    """Draw the penalty against the step, with a few markers."""
    ordered = sorted(points, key=itemgetter("step"))
    every = math.ceil(len(ordered) / MOST_MARKERS)
    steps = values(ordered, "step")
    heights = numbers(ordered, "penalty")
    axis.plot(steps, heights, label=name, markevery=every, **look)


def _penalty_map(routes: Routes) -> Figure:
    """Draw penalty over all site pairs: a row of panels with one scale for each method, a column for each line."""
    sited = known(routes.rows, "site_x")
    up = sorted(distinct(sited, "site_x"))
    across = sorted(distinct(sited, "site_y"))
    size = max(1.9, 0.42 * len(across)) + 0.45, max(1.9, 0.42 * len(up)) + 0.7
    count = len(routes.lines)
    every = len(routes.methods) * count
    figure, axes = drawing.panels(every, count, size, (1.3, 0.4), boxed=True, font=8)
    titles = [line.name for line in routes.lines]
    for place, method in enumerate(routes.methods):
        row = axes[place * count : (place + 1) * count]
        cells = [where(line.rows, method=method) for line in routes.lines]
        _draw_penalties(row, titles, cells, (up, across))
        row[0].set_ylabel(method, fontsize=9)
        titles = [""] * count  # they stand above the first row
    drawing.label(figure, "site of the target", "site of the source")
    return figure


# ---------------------------------------------------------------------- tables


def _draw_penalties(
    axes: Sequence[Axes],
    titles: Sequence[str],
    cells: Sequence[Sequence[Row]],
    sites: tuple[Sequence[Any], Sequence[Any]],
) -> None:
    """Draw the maps of one method with one scale; `sites` go up and across."""
    ends = _ends(values(known(chain(*cells), "penalty"), "penalty"))
    bar: drawing.Look = {"shrink": 0.8, "pad": 0.01, "label": "penalty, nats"}
    columns = ("site_x", "site_y", "penalty")
    drawing.heat_maps(axes, titles, cells, columns, *sites, *ends, **bar)


def _table(routes: Routes, method: str) -> SiteTable:
    """Make the table of a method: lines down, sites across, the penalty ± half its interval and the task's score.

    Of a grid, only the matching sites are shown. Means over routes show how much of the score is lost.
    """
    heading, column = score_heading(routes.rows), "score"
    native = [f"native\n{heading}"]
    if routes.averaged:
        heading, column = "lost × 100", "score_penalty"
        native = []
    sites = site_names(routes.pairs)
    groups = {"penalty, nats": sites, heading: sites}
    title = _table_title(routes, method)
    table = SiteTable(title, ["from → into"], native, groups)
    for line in routes.lines:
        cells = by_sites(where(line.rows, method=method))
        if not cells:
            continue
        here = list(map(cells.get, routes.pairs))
        texts = []
        if not routes.averaged:
            for row in where(line.rows, method="native"):
                texts.append(_score(row, column))
        texts += map(_penalty, here)
        texts += [_score(row, column) for row in here]
        table.add_row(line.name, *texts, style="dim" if line.same else None)
    return table


def _table_title(routes: Routes, method: str) -> str:
    about = where(routes.rows, method=method)[0]
    title = method
    if about["fit"] not in (None, "none"):
        title += f", {about['fit']}"
    if about["parameters"]:
        title += f", {about['parameters']:,} parameters a site"
    if routes.is_grid:
        title += ", matching sites"
    return title


def _penalty(row: Row | None) -> str:
    if row is None:
        return ""
    if row["penalty"] is None:
        return "overflow"
    return with_interval(row, "penalty", "z.3f")


def _score(row: Row | None, column: str) -> str:
    if row is None or row[column] is None:
        return ""
    return mark(f"{100 * row[column]:z.1f}", row)
