"""The report of a universe: every map i -> j, and the directions of the shared space."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aligners.fitting.training_status import (
    beside_far_rows,
    mark,
    what_did_not_train,
    worst_of,
)
from aligners.fitting.universe.universe import CLOSED_UNIVERSES, NETWORK
from aligners.reports.closest import known_lines, trained
from aligners.reports.drawing import (
    COLOURS,
    Look,
    heat_maps,
    label,
    log_scale,
    panels,
    short,
)
from aligners.reports.names import (
    aligned,
    blank,
    counted,
    plain_number,
    quoted,
    short_names,
    span,
    with_short_names,
)
from aligners.reports.report import (
    Report,
    Row,
    distinct,
    grouped,
    is_known,
    largest,
    mean,
    values,
    where,
)
from aligners.reports.runs.injection_report import retrieval
from aligners.reports.screen import SiteTable

PAYS = 0.95  # of the trained space's error, below which a linear one shows that it can be improved
ACROSS = 4  # heat maps in a row
SHARED = 0.5  # of the others' variance in a direction, above which a model shares it
HELD = (
    0.999  # of a model's variance, below which the space is said to hold less than all
)
MOST_TYPES = 5
WHO = {"all": "all models", "some": "some", "one": "this one alone"}  # has a direction


def report(
    meta: Row,
    rows: Sequence[Row],
    directions: Sequence[Row] = (),
    shared: Sequence[Row] = (),
    curve: Sequence[Row] = (),
    types: Sequence[Row] = (),
) -> Report:
    """Make the report from one row for each map, ordered pair of models and site.

    Args:
        meta: what holds for all rows.
        rows: rows of `UniverseEvaluation`.
        directions: for each site and direction of the space its variance, and what each model explains of it.
        shared: for each site and model what the space holds of its states, and who else has their directions.
        curve: for each site and number of directions the share of each model's variance in so many.
        types: for each site the types of tokens or words whose states the others say worst.
    """
    shown = with_short_names(rows)
    figures = _maps_by_site(shown)
    figures["directions"] = partial(_directions, directions)
    if curve:
        figures["shared"] = partial(_shared, shared, curve)
    findings = beside_far_rows(shown)
    findings += _directions_in_words(directions) + _space_in_words(shared, types)
    for name, why in meta.get("left_out", {}).items():
        findings.append(f"The linear {name} of all models is left out. {why}")
    findings += _refits(shown) + retrieval(shown) + what_did_not_train(shown)
    tables = {
        "directions": directions,
        "shared": shared,
        "curve": curve,
        "types": types,
    }
    return Report(
        "universe",
        meta,
        rows,
        {name: table for name, table in tables.items() if table},
        figures=figures,
        screen=[_table(shown)],
        lead=lead(shown),
        sentences=findings,
    )


def _by_site(rows: Sequence[Row]) -> dict[object, list[Row]]:
    """Group rows by site; rows of earlier versions only have `site_x`."""
    return grouped(rows, "site" if is_known(rows, "site") else "site_x")


def _names(rows: Sequence[Row]) -> dict[str, str]:
    """Return the models of a table with a column for each, and their short names."""
    columns = ("site", "direction", "directions", "variance")
    return short_names(name for name in rows[0] if name not in columns)


# ---------------------------------------------------------------------- what is said


def lead(rows: Sequence[Row]) -> str:
    """Say what the maps through the space leave unexplained, beside other maps, and how exact ways back are.

    Args:
        rows: rows of the report, with short names of models.
    """
    models = len(distinct(rows, "model_x"))
    sites = counted(len(_by_site(rows)), "site")
    said = (
        f"{models} models were mapped into one space at {sites}, each by a bijection of its own, and from one model "
        "into another through it."
    )
    lines = trained(known_lines(rows, "fvu"))
    if NETWORK in lines:
        left = {
            name: f"{plain_number(100 * mean(line, 'fvu'))}%"
            for name, line in lines.items()
        }
        own = left.pop(NETWORK)
        over = "mean over ordered pairs and sites"
        said += f" Of the variance of held-out rows this leaves {own} unexplained (FVU), {over}"
        if left:
            others = [f"{name} {share}" for name, share in left.items()]
            said += f"; other maps of the same models: {', '.join(others)}"
        said += "."
    else:
        said += (
            " The bijections were not trained, with finite errors, at every site, so they are compared with no other "
            "maps."
        )
    ours = where(rows, method=NETWORK)
    cycle = largest(ours, "cycle")
    trip = largest(ours, "round_trip")
    if cycle is not None:
        said += f" From a model over two others back to it, states are off by at most {cycle:.1e} of the largest value"
        said += "." if trip is None else f"; into the space and back by {trip:.1e}."
    return said


def _directions_in_words(directions: Sequence[Row]) -> list[str]:
    """Say how many directions of the space all models share, how many some of them, and how many none."""
    said = []
    for site, line in grouped(directions, "site").items():
        names = _names(directions)
        counts = []
        for row in line:
            counts.append(sum(row[name] > SHARED for name in names))
        every = counts.count(len(names))
        none = counts.count(0)
        some = len(line) - every - none
        said.append(
            f"Site {site}: of {len(line)} directions {every} are shared by all models, {some} by some, {none} by none "
            f"(a model shares one if it explains more than {SHARED:.0%} of the others' variance there)."
        )
    return said


def _space_in_words(shared: Sequence[Row], types: Sequence[Row]) -> list[str]:
    """Say what the space does not hold of a model, and which types the other models predict worst."""
    said = []
    for row in shared:
        if row["held"] < HELD:
            model = f"{row['model']} (width {row['width']})"
            held = f"{row['held']:.1%} of the variance of {model}"
            said.append(
                f"Site {row['site']}: the {row['shared']} shared coordinates hold {held}."
            )
    for site, line in grouped(types, "site").items():
        worst = line[:MOST_TYPES]
        named = ", ".join(map(quoted, values(worst, "type")))
        times = span(worst, "times", ".1f")
        said.append(
            f"Site {site}: of the types with enough rows, {named} are shared least: the others say their states with "
            f"{times} times the mean error."
        )
    return said


def _refits(rows: Sequence[Row]) -> list[str]:
    """Name the models that a linear space of all models maps with less error than the trained one."""
    said = []
    for model in distinct(rows, "model_x"):
        own = [row for row in rows if model in (row["model_x"], row["model_y"])]
        errors = {}
        for name, line in grouped(own, "method").items():
            errors[name] = mean(line, "fvu", known=True)
        best = min(errors, key=lambda name: errors[name])
        trained_error = errors.get(NETWORK, math.inf)
        if best in CLOSED_UNIVERSES and errors[best] < PAYS * trained_error:
            said.append(
                f"From and to {model} the linear {best} of all models has the lower FVU, {short(errors[best])} against "
                f"{short(trained_error)}: more steps, or a refit of all after it has joined, would pay."
            )
    return said


# ---------------------------------------------------------------------- table


def _table(rows: Sequence[Row]) -> SiteTable:
    """Make the table of means over all directions and sites."""
    columns = ["parameters", "FVU", "unseen", "round trip", "cycle", "top 1 of all"]
    title = "Mean over all ordered pairs of models and sites, held-out rows"
    table = SiteTable(title, ["maps"], columns, {})
    for name, line in grouped(rows, "method").items():
        cells = [f"{line[0]['parameters']:,}" if line[0]["parameters"] else ""]
        for column in ("fvu", "fvu_unseen"):
            cells.append(aligned(mean(line, column, known=True)))
        for column in ("round_trip", "cycle"):
            cells.append(blank(mean(line, column, known=True), ".1e"))
        if is_known(line, "top1_all"):  # not in reports of earlier versions
            cells.append(aligned(mean(line, "top1_all", known=True)))
        table.add_row(mark(name, worst_of(line)), *cells)
    return table


# ---------------------------------------------------------------------- figures


def _maps_by_site(rows: Sequence[Row]) -> dict[str, Callable[[], Figure]]:
    figures: dict[str, Callable[[], Figure]] = {}
    for site, here in _by_site(rows).items():
        name = f"universe_site_{str(site).replace(':', '-')}"
        figures[name] = partial(_heat_maps, here, f"site {site}")
    return figures


def _heat_maps(rows: Sequence[Row], site: str) -> Figure:
    """Draw FVU from every model into every other, a panel for each kind of maps."""
    names = distinct(rows, "model_y")
    methods = grouped(rows, "method")
    size = (0.5 * len(names) + 1.0, 0.5 * len(names) + 0.6)
    figure, axes = panels(
        len(methods), ACROSS, size, (1.6, 0.8), boxed=True, sharey=True
    )
    top = min(1.0, largest(rows, "fvu") or 1.0)
    titles = [_with_mean(name, line) for name, line in methods.items()]
    columns = ("model_x", "model_y", "fvu")
    bar: Look = {"label": "FVU", "shrink": 0.8, "extend": "max"}
    heat_maps(axes, titles, methods.values(), columns, names, names, 0, top, **bar)
    for axis in axes:
        _name_models(axis, names)
    label(figure, "into", "from", site)
    return figure


def _name_models(axis: Axes, names: Sequence[str]) -> None:
    places = range(len(names))
    axis.set_xticks(places, names, rotation=45, ha="right", fontsize=7)
    axis.set_yticks(places, names, fontsize=7)


def _with_mean(name: str, line: Sequence[Row]) -> str:
    title = mark(name, worst_of(line))
    average = mean(line, "fvu", known=True)
    if math.isnan(average):
        return title
    return f"{title}, mean {short(average)}"


def _directions(rows: Sequence[Row]) -> Figure:
    """Draw, site by site, the variance along the space's directions, and what each model shares of them."""
    sites = grouped(rows, "site")
    names = _names(rows)
    size = (3.8, 0.2 * len(names) + 1.2)
    figure, axes = panels(2 * len(sites), 2, size, (1.0, 0.6), width_ratios=(1, 1.7))
    lefts, rights = axes[::2], axes[1::2]
    for (site, here), left, right in zip(sites.items(), lefts, rights, strict=True):
        _variances(left, here)
        left.set_title(f"site {site}: variance of the models' mean", fontsize=9)
        image = _shares(right, here, names)
        title = f"site {site}: what each model shares with the others"
        right.set_title(title, fontsize=9)
    words = "squared correlation\nwith the others' mean"
    figure.colorbar(image, ax=rights, label=words)
    figure.supxlabel(
        "direction of the shared space, the largest variance first", fontsize=9
    )
    return figure


def _variances(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw the variance along each direction on a logarithmic scale."""
    across = values(rows, "direction")
    axis.plot(across, values(rows, "variance"), color=COLOURS[0], marker=".")
    log_scale([axis])


def _shares(axis: Axes, rows: Sequence[Row], names: Mapping[str, str]) -> Any:
    """Draw what each model (down) shares with the others along each direction (across)."""
    grid = np.array([values(rows, name) for name in names])
    extent = (0.5, len(rows) + 0.5, len(names) - 0.5, -0.5)
    look: Look = {"cmap": "viridis", "aspect": "auto", "interpolation": "nearest"}
    image = axis.imshow(grid, vmin=0, vmax=1, extent=extent, **look)
    axis.set_yticks(range(len(names)), list(names.values()), fontsize=8)
    return image


def _shared(rows: Sequence[Row], curve: Sequence[Row]) -> Figure:
    """Draw, site by site, which models share each model's directions, and how much the first directions hold."""
    sites = grouped(rows, "site")
    points = grouped(curve, "site")
    names = _names(curve)
    size = (3.6, 0.3 * len(names) + 1.4)
    figure, axes = panels(2 * len(sites), 2, size, (0.8, 0.8))
    for (site, here), left, right in zip(
        sites.items(), axes[::2], axes[1::2], strict=True
    ):
        _owners(left, here, names)
        left.set_title(f"site {site}: who has its directions", fontsize=9)
        _held(right, here, points[site], names)
        right.set_title(f"site {site}: in the first directions", fontsize=9)
    axes[0].legend(
        fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.12), ncols=3
    )
    return figure


def _owners(axis: Axes, rows: Sequence[Row], names: Mapping[str, str]) -> None:
    """Draw a bar for each model, split by who has its directions."""
    up = np.arange(len(rows))
    left = np.zeros(len(rows))
    for place, (group, called) in enumerate(WHO.items()):
        share = np.array(values(rows, group))
        colour = mpl.colormaps["viridis"](0.9 - 0.4 * place)
        axis.barh(up, share, left=left, color=colour, label=called)
        left += share
    axis.set_yticks(
        up, [f"{names[row['model']]} ({row['width']})" for row in rows], fontsize=8
    )
    axis.invert_yaxis()
    axis.set_xlabel("share of the variance")


def _held(
    axis: Axes, rows: Sequence[Row], points: Sequence[Row], names: Mapping[str, str]
) -> None:
    """Draw how much of each model's variance the first directions hold, and as a dot what the trained space holds."""
    for place, (name, row) in enumerate(zip(names, rows, strict=True)):
        colour = COLOURS[place % len(COLOURS)]
        across = values(points, "directions")
        up = values(points, name)
        axis.plot(across, up, label=names[name], color=colour, linewidth=1.3)
        axis.plot(
            [row["shared"]], [row["held"]], marker="o", linestyle="", color=colour
        )
    axis.set(xlabel="directions, the most shared first", ylabel="share of the variance")
    axis.set_ylim(0, 1.02)
    axis.legend(fontsize=7, frameon=False, loc="lower right")
