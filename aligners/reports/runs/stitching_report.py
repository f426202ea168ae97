"""The report of stitching: penalties and scores by route, method and site pair, and the findings in words."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import combinations, permutations, product
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from aligners.fitting.training_status import is_trained, mark, what_did_not_train
from aligners.injection.scoring.pair_intervals import OVER_MODELS, over_pairs
from aligners.reports import drawing
from aligners.reports.names import (
    score_heading,
    score_words,
    short_names,
    site_name,
    with_interval,
    with_short_names,
)
from aligners.reports.report import (
    Report,
    Row,
    by_sites,
    grouped,
    models_in,
    number,
    site_pairs,
    where,
)
from aligners.reports.screen import SiteTable
from aligners.reports.templates import sentences
from aligners.similarity.controls import matching_layers

Pair = tuple[int, int]
Groups = Mapping[str, Sequence[str]] | None
MOST_MODELS = 3  # more routes than theirs cannot be told apart in a panel
MOST_SITES_TOGETHER = 3  # penalty and accuracy side by side
LOST = "lost × 100"  # of the score, if lines are means over routes
SMALL = 0.01  # nats, and hundredths of the score
PENALTY = "penalty: stitched minus native loss, nats"


def report(
    meta: Row, rows: Sequence[Row], curves: Sequence[Row] = (), groups: Groups = None
) -> Report:
    """Make the report from rows and learning curves.

    Args:
        meta: what holds for all rows.
        rows: one for each route, method and site pair, and one "native" for each route.
        curves: one for each route, method, site pair and step.
        groups: of models. With groups, or many models, means over pairs of models are shown.
    """
    routes, trained = Routes(rows, groups), grouped(curves, "method")
    figures: dict[str, Callable[[], Figure]] = {
        "penalty": partial(_by_site, routes, "penalty", PENALTY),
        "accuracy": partial(_accuracy_figure, routes),
        **({"map": partial(_penalty_map, routes)} if routes.is_grid else {}),
    }
    for method, method_curves in trained.items():
        figures["curves" if len(trained) == 1 else f"curves_{method}"] = partial(
            _curve_figure, method_curves, groups
        )
    tables = {"pairs": over_pairs(rows, groups) if routes.averaged else [], "curves": curves}
    findings = [*_findings(routes), *what_did_not_train(with_short_names(rows))]
    screen, note = _tables(routes), f"±: half of the {routes.intervals}"
    return Report(
        "stitching",
        meta,
        rows,
        tables,
        figures=figures,
        screen=screen,
        note=note,
        sentences=findings,
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
    """The rows of all routes, and the lines in which they are shown.

    Args:
        rows: of all routes.
        groups: of models, as in `over_pairs`.
        averaging: other arguments of `over_pairs`.
    """

    def __init__(self, rows: Sequence[Row], groups: Groups = None, **averaging: Any) -> None:
        self.rows, self.groups, self.averaging = rows, groups, averaging
        self.routes = grouped(rows, "model_x", "model_y")

    @property
    def averaged(self) -> bool:
        """Whether lines are means over routes: with groups, or with too many models to tell routes apart."""
        return self.groups is not None or len(set(models_in(self.rows))) > MOST_MODELS

    @cached_property
    def lines(self) -> list[Line]:
        """A line for each route, or for each group; models stitched to themselves come last."""
        if self.averaged:
            means = grouped(over_pairs(self.rows, self.groups, **self.averaging), "group")
            lines = [
                Line(name, name, name, name == "same model", rows) for name, rows in means.items()
            ]
        else:
            names = short_names(models_in(self.rows))
            lines = [
                Line(f"{names[x]} → {names[y]}", x, y, x == y, rows)
                for (x, y), rows in self.routes.items()
            ]
        return sorted(lines, key=lambda line: line.same)

    @property
    def methods(self) -> list[str]:
        """The methods that have sites, floors last."""
        roles = {row["method"]: row["role"] for row in self.rows if row["site_x"] is not None}
        return sorted(roles, key=lambda method: roles[method] == "floor")

    @cached_property
    def matching(self) -> list[tuple[list[Pair], list[Pair]]]:
        """The site pairs of each route: all, and where they are a grid only those of equal relative depth."""
        matching = []
        for pairs in filter(None, map(site_pairs, self.routes.values())):
            depths = [sorted(set(sites)) for sites in zip(*pairs, strict=True)]
            is_grid = len(pairs) > max(map(len, depths))
            matching.append(
                (
                    pairs,
                    [pair for pair in matching_layers(*depths) if pair in pairs]
                    if is_grid
                    else pairs,
                )
            )
        return matching

    @property
    def is_grid(self) -> bool:
        """Whether some route pairs a site of its source with more than one site of its target."""
        return any(len(shown) < len(pairs) for pairs, shown in self.matching)

    @property
    def pairs(self) -> list[Pair]:
        """The site pairs of all routes by depth; of a grid, only those of equal relative depth."""
        return sorted(
            {pair for _, shown in self.matching for pair in shown},
            key=lambda pair: (sum(pair), pair),
        )

    @property
    def intervals(self) -> str:
        """What the lines' intervals are taken over, in words."""
        if not self.averaged:
            return "95 % interval over texts"
        return " or ".join(sorted({row["interval"] for line in self.lines for row in line.rows}))

    @property
    def looks(self) -> dict[str, drawing.Look]:
        """Targets have colours, sources markers, groups both; models stitched to themselves are dashed."""
        targets, sources = (
            [*dict.fromkeys(line[place] for line in self.lines)] for place in (2, 1)
        )
        looks = {}
        for name, x, y, same, _ in self.lines:
            places = targets.index(y), sources.index(x)
            looks[name] = drawing.line_look(*places, "--" if same else "-", drawing.MODEL_COLOURS)
        return looks

    def shares(self) -> list[tuple[str, list[Line]]]:
        """Lines shared out to panels; with each share, what its panel's title says of it besides."""
        panels = drawing.shared_out(
            [line for line in self.lines if line.same == same] for same in (False, True)
        )
        alone = [len(panels) > 1 and all(line.same for line in panel) for panel in panels]
        return [
            (", each into itself" * same, panel) for same, panel in zip(alone, panels, strict=True)
        ]


# ---------------------------------------------------------------------- figures


def _accuracy_figure(routes: Routes) -> Figure:
    """Draw the task's score against site, below the target's own; for groups, how much of it is lost."""
    words = score_words(routes.rows)
    if routes.averaged:
        zero: drawing.Look = {"color": "0.6", "linewidth": 0.8}
        return _by_site(routes, "score_penalty", f"lost {words}", 100, [(None, zero, 0)])
    natives = {row["model_y"]: number(row["score"]) for row in where(routes.rows, method="native")}
    colours = {line.model_y: routes.looks[line.name]["color"] for line in routes.lines}
    thin: drawing.Look = {"linewidth": 0.8, "alpha": 0.6}
    levels = [
        (None, {"color": colours[name], **thin}, natives[name])
        for name in colours
        if name in natives
    ]
    return _by_site(routes, "score", f"{words}; thin: the target by itself", 100, levels)


def _by_site(
    routes: Routes, column: str, up: str, scale: float = 1, levels: Sequence[drawing.Level] = ()
) -> Figure:
    """Draw a column against site, a line for each route (Brown et al. 2023, Figure 1).

    Each method has a panel, or several where lines are many, with the same levels.
    """
    pairs, looks, panels = routes.pairs, routes.looks, []
    for method, (aside, share) in product(routes.methods, routes.shares()):
        cells = {line.name: by_sites(where(line.rows, method=method)) for line in share}
        lines = [
            (name, looks[name], [by_pair.get(pair) for pair in pairs])
            for name, by_pair in cells.items()
        ]
        panels.append(drawing.SitePanel(method + aside, pairs, lines, levels))
    across = "site (matching layers)" if routes.is_grid else "site (layer)"
    return drawing.site_figure(panels, column, up, scale, across, f"bars: {routes.intervals}")


def _curve_figure(curves: Sequence[Row], groups: Groups) -> Figure:
    """Draw the penalty of one method on validation texts during training (Brown et al. 2023, Figure 6)."""
    routes = Routes(curves, groups, quantities=("penalty",), by=("site_x", "site_y", "step"))
    looks, parts = routes.looks, list(product(routes.pairs, routes.shares()))
    figure, axes = drawing.panels(
        len(parts), drawing.ABREAST, drawing.PANEL, (2.0, 0.6), sharey=True
    )
    for (pair, (aside, share)), axis in zip(parts, axes, strict=True):
        for line in share:
            steps = where(line.rows, site_x=pair[0], site_y=pair[1])
            if points := sorted((row["step"], number(row["penalty"])) for row in steps):
                every = -(-len(points) // 12)
                axis.plot(
                    *zip(*points, strict=True), label=line.name, **looks[line.name], markevery=every
                )
        axis.set_title(f"site {site_name(pair)}{aside}", fontsize=10)
    drawing.penalty_scale(axes)
    drawing.dress(figure, axes, "step", PENALTY)
    figure.suptitle(curves[0]["method"], fontsize=10)
    return figure


def _penalty_map(routes: Routes) -> Figure:
    """Draw penalty over all site pairs: a row of panels with one scale for each method, a column for each line."""
    lines, methods, pairs = routes.lines, routes.methods, site_pairs(routes.rows)
    layers = sorted({x for x, _ in pairs}), sorted({y for _, y in pairs})
    height, width = (max(1.9, 0.42 * len(entries)) for entries in layers)
    count, size = len(lines), (width + 0.45, height + 0.7)
    figure, axes = drawing.panels(len(methods) * count, count, size, (1.3, 0.4), boxed=True, font=8)
    for place, method in enumerate(methods):
        cells = [where(line.rows, method=method) for line in lines]
        known = [
            row["penalty"] for entries in cells for row in entries if row["penalty"] is not None
        ]
        ends = (min([0.0, *known]), max([drawing.LINEAR_UP_TO, *known])) if known else (0.0, 1.0)
        titles = [line.name if place == 0 else "" for line in lines]
        across, columns = axes[place * count : (place + 1) * count], ("site_x", "site_y", "penalty")
        drawing.heat_maps(
            across,
            titles,
            cells,
            columns,
            *layers,
            *ends,
            shrink=0.8,
            pad=0.01,
            label="penalty, nats",
        )
        across[0].set_ylabel(method, fontsize=9)
    drawing.label(figure, "site of the target", "site of the source")
    return figure


# ---------------------------------------------------------------------- tables


def _tables(routes: Routes) -> list[SiteTable]:
    """Tables with lines down and sites across: the penalty ± half its interval's width, and the task's score.

    Of many sites each has a table of its own; of a grid, only the matching sites are shown. Means over routes show how
    much of the score is lost.
    """
    pairs = routes.pairs
    units = ["penalty", LOST if routes.averaged else score_heading(routes.rows)]
    blocks = [[unit] for unit in units] if len(pairs) > MOST_SITES_TOGETHER else [units]
    return [_table(routes, method, block, pairs) for method in routes.methods for block in blocks]


def _table(routes: Routes, method: str, columns: Sequence[str], pairs: Sequence[Pair]) -> SiteTable:
    about = where(routes.rows, method=method)[0]
    parameters = about["parameters"] and f"{about['parameters']:,} parameters a site"
    fit = None if about["fit"] == "none" else about["fit"]
    title = ", ".join(
        filter(None, [method, fit, parameters, "matching sites" if routes.is_grid else ""])
    )
    whole = [column for column in columns if column not in ("penalty", LOST)]
    sites = [site_name(pair) for pair in pairs]
    across = {f"{column}, nats" if column == "penalty" else column: sites for column in columns}
    table = SiteTable(title, ["from → into"], [f"native\n{column}" for column in whole], across)
    for line in routes.lines:
        if cells := by_sites(where(line.rows, method=method)):
            natives = where(line.rows, method="native") if whole else []
            texts = [_cell(cells.get(pair), column) for column in columns for pair in pairs]
            native = [_cell(row, "score") for row in natives]
            table.add_row(line.name, *native, *texts, style="dim" if line.same else None)
    return table


def _cell(row: Row | None, column: str) -> str:
    if row is None:
        return ""
    if column != "penalty":
        value = row["score_penalty" if column == LOST else "score"]
        return "" if value is None else mark(f"{100 * value:z.1f}", row)
    return "overflow" if row["penalty"] is None else with_interval(row, "penalty", "z.3f")


# ---------------------------------------------------------------------- findings


def _findings(routes: Routes) -> list[str]:
    """Write a sentence for each finding on each method.

    They say which direction costs more, whether models stitched to themselves lose anything, how much of the targets'
    score is kept and, with groups, which routes cost more. Of a route that overflows they say only that it does, and
    nothing of a layer that is not trained.
    """
    trained = {
        name: list(filter(is_trained, where(routes.rows, method=name))) for name in routes.methods
    }
    methods = [
        _facts(name, method_rows, routes) for name, method_rows in trained.items() if method_rows
    ]
    names, score = short_names(models_in(routes.rows)), score_words(routes.rows)
    return sentences("stitching", methods=methods, small=SMALL, names=names, score=score)


def _facts(name: str, rows: Sequence[Row], routes: Routes) -> Row:
    """What the sentences on a method are made of."""
    sound, floor = [row for row in rows if row["penalty"] is not None], rows[0]["role"] == "floor"
    return {
        "name": name,
        "floor": floor,
        "rows": rows,
        "different": where(sound, same_model=False),
        "directions": [] if floor or routes.averaged else list(_directions(sound)),
        **_baselines(sound),
        "groups": []
        if routes.groups is None
        else list(_between_groups(Routes(rows, routes.groups))),
    }


def _directions(rows: Sequence[Row]) -> Iterator[Row]:
    """Of each pair of models which direction costs more, comparing X's site l into Y's m with Y's m into X's l."""
    cells = {(row["model_x"], row["model_y"], row["site_x"], row["site_y"]): row for row in rows}
    for x, y in combinations(dict.fromkeys(models_in(rows)), 2):
        both = [(row, cells[y, x, j, i]) for (a, b, i, j), row in cells.items() if (a, b) == (x, y)
                and (y, x, j, i) in cells]  # fmt: skip
        if _dearer(both) < _dearer([(b, a) for a, b in both]):
            x, y, both = y, x, [(b, a) for a, b in both]
        if both:
            yield {
                "x": x,
                "y": y,
                "dearer": _dearer(both),
                "places": len(both),
                "pairs": any(row["site_x"] != row["site_y"] for row, _ in both),
                "beyond": sum(a["penalty_low"] > b["penalty_high"] for a, b in both),
                "against": sum(b["penalty_low"] > a["penalty_high"] for a, b in both),
            }


def _dearer(pairs: Sequence[tuple[Row, Row]]) -> int:
    return sum(a["penalty"] > b["penalty"] for a, b in pairs)


def _baselines(rows: Sequence[Row]) -> Row:
    """What stitching a model to itself costs, and where different models cost more."""
    same = [row for row in where(rows, same_model=True) if row["site_x"] == row["site_y"]]
    base = {(row["model_y"], row["site_y"]): row["penalty_high"] for row in same}
    compared = [
        row for row in where(rows, same_model=False) if (row["model_y"], row["site_y"]) in base
    ]
    dearer = sum(row["penalty_low"] > base[row["model_y"], row["site_y"]] for row in compared)
    return {"same": same, "compared": compared, "dearer": dearer}


def _between_groups(routes: Routes) -> Iterator[Row]:
    """Compare routes from one group into another with those within either group."""
    lines = {
        line.name: by_sites(row for row in line.rows if row["penalty"] is not None)
        for line in routes.lines
    }
    for a, b in permutations(routes.groups or (), 2):
        within = [lines[name] for name in (f"{a}-to-{a}", f"{b}-to-{b}") if name in lines]
        between = lines.get(f"{a}-to-{b}", {})
        both = [(row, [inner[place] for inner in within]) for place, row in between.items()
                if within and all(place in inner for inner in within)]  # fmt: skip
        if both:
            over_models = all(
                row["interval"] == OVER_MODELS for one, inner in both for row in (one, *inner)
            )
            clear = sum(
                all(one["penalty_low"] > other["penalty_high"] for other in inner)
                for one, inner in both
            )
            yield {
                "a": a,
                "b": b,
                "places": len(both),
                "dearer": sum(
                    all(one["penalty"] > other["penalty"] for other in inner) for one, inner in both
                ),
                "beyond": clear if over_models else None,
            }
