"""The report of a universe: every map i -> j, and what the directions of the shared space are."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from aligners.fitting.training_status import beside_far_rows, mark, what_did_not_train, worst_of
from aligners.fitting.universe.universe import CLOSED_UNIVERSES, NETWORK
from aligners.reports.drawing import COLOURS, Look, heat_maps, label, log_scale, panels, short
from aligners.reports.names import aligned, short_names, with_short_names
from aligners.reports.report import Report, Row, distinct, grouped, is_known, largest, mean
from aligners.reports.runs.injection_report import retrieval
from aligners.reports.screen import SiteTable
from aligners.reports.templates import sentences

TABLES = ("shared", "curve", "types")
FIGURES = ("fvu", "fvu_unseen", "round_trip", "cycle")
PAYS = 0.95  # of the trained space's error, below which a linear one shows that it can be improved
ACROSS = 4  # heat maps in a row


def report(
    meta: Row, rows: Sequence[Row], directions: Sequence[Row] = (), **tables: Sequence[Row]
) -> Report:
    """Make the report from one row for each map, ordered pair of models and site.

    Args:
        meta: what holds for all rows.
        rows: of `UniverseEvaluation`.
        directions: for each site and direction of the space its variance, and what each model explains of it.
        tables: `shared`, for each site and model what the space holds of its states, and who else has their directions;
            `curve`, for each site and number of directions the share of each model's variance in so many; `types`, for
            each site the types of tokens or words whose states the others say worst.
    """
    shown, (shared, curve, types) = (
        with_short_names(rows),
        [tables.get(name, ()) for name in TABLES],
    )
    by_site = grouped(
        shown, "site" if is_known(rows, "site") else "site_x"
    )  # the latter in earlier versions
    figures: dict[str, Callable[[], Figure]] = {
        f"universe_site_{str(site).replace(':', '-')}": partial(_heat_maps, of_site, f"site {site}")
        for site, of_site in by_site.items()
    }
    figures["directions"] = partial(_directions, directions, _names(directions))
    if curve:
        figures["shared"] = partial(_shared, shared, curve)
    about = {
        "directions": directions,
        "names": _names(directions),
        "shared": shared,
        "types": types,
    }
    findings = sentences(
        "universe", **about, left_out=meta.get("left_out", {}), refits=_refits(shown)
    )
    findings = [*beside_far_rows(shown), *findings]
    findings += retrieval(shown) + what_did_not_train(shown)
    kept = {name: table for name, table in {"directions": directions, **tables}.items() if table}
    return Report(
        "universe", meta, rows, kept, figures=figures, screen=[_table(shown)], sentences=findings
    )


def _names(directions: Sequence[Row]) -> dict[str, str]:
    """The models of the table of directions, and their short names."""
    return short_names(
        name
        for name in directions[0]
        if name not in ("site", "direction", "directions", "variance")
    )


def _table(rows: Sequence[Row]) -> SiteTable:
    """Means over all directions and sites."""
    known = is_known(rows, "top1_all")  # not in reports of earlier versions
    columns = [
        "parameters",
        "FVU",
        "unseen",
        "round trip",
        "cycle",
        *(["top 1 of all"] if known else []),
    ]
    table = SiteTable(
        "Mean over all ordered pairs of models and sites, held-out rows", ["maps"], columns, {}
    )
    for name, line in grouped(rows, "method").items():
        values = [mean(line, column, known=True) for column in FIGURES]
        trips = (f"{value:.1e}".replace("nan", "") for value in values[2:])
        parameters = f"{line[0]['parameters']:,}" if line[0]["parameters"] else ""
        top1 = [aligned(mean(line, "top1_all", known=True))] if known else []
        table.add_row(
            mark(name, worst_of(line)), parameters, *map(aligned, values[:2]), *trips, *top1
        )
    return table


def _refits(rows: Sequence[Row]) -> Iterator[Row]:
    """Models whose maps a linear space of all has with less error than the trained one, that space, and both errors."""
    for model in distinct(rows, "model_x"):
        of_model = [row for row in rows if model in (row["model_x"], row["model_y"])]
        known = {
            name: mean(line, "fvu", known=True)
            for name, line in grouped(of_model, "method").items()
        }
        best, own = min(known, key=lambda name: known[name]), known.get(NETWORK, np.inf)
        if best in CLOSED_UNIVERSES and known[best] < PAYS * own:
            yield {"model": model, "best": best, "fvu": short(known[best]), "own": short(own)}


def _heat_maps(rows: Sequence[Row], site: str) -> Figure:
    """Draw FVU from every model into every other, a panel for each kind of maps."""
    names, methods = distinct(rows, "model_y"), grouped(rows, "method")
    size = (0.5 * len(names) + 1.0, 0.5 * len(names) + 0.6)
    figure, axes = panels(len(methods), ACROSS, size, (1.6, 0.8), boxed=True, sharey=True)
    top, titles = (
        min(1.0, largest(rows, "fvu") or 1.0),
        [_title(*method) for method in methods.items()],
    )
    columns = ("model_x", "model_y", "fvu")
    heat_maps(
        axes,
        titles,
        methods.values(),
        columns,
        names,
        names,
        0,
        top,
        label="FVU",
        shrink=0.8,
        extend="max",
    )
    for axis in axes:
        axis.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=7)
        axis.set_yticks(range(len(names)), names, fontsize=7)
    label(figure, "into", "from", site)
    return figure


def _title(name: str, rows: Sequence[Row]) -> str:
    average = mean(rows, "fvu", known=True)
    return mark(name, worst_of(rows)) + ("" if np.isnan(average) else f", mean {short(average)}")


def _directions(rows: Sequence[Row], names: dict[str, str]) -> Figure:
    """Draw, site by site, the variance along the space's directions, and what each model shares of them."""
    sites = grouped(rows, "site")
    figure, axes = panels(
        2 * len(sites), 2, (3.8, 0.2 * len(names) + 1.2), (1.0, 0.6), width_ratios=(1, 1.7)
    )
    for (site, site_rows), variance, shares in zip(
        sites.items(), axes[::2], axes[1::2], strict=True
    ):
        places = [row["direction"] for row in site_rows]
        variance.plot(places, [row["variance"] for row in site_rows], color=COLOURS[0], marker=".")
        log_scale([variance])
        variance.set_title(f"site {site}: variance of the models' mean", fontsize=9)
        grid = np.array([[row[name] for row in site_rows] for name in names])
        extent = (0.5, len(site_rows) + 0.5, len(names) - 0.5, -0.5)
        look: Look = {"cmap": "viridis", "aspect": "auto", "interpolation": "nearest"}
        image = shares.imshow(grid, vmin=0, vmax=1, extent=extent, **look)
        shares.set_yticks(range(len(names)), list(names.values()), fontsize=8)
        shares.set_title(f"site {site}: what each model shares with the others", fontsize=9)
    figure.colorbar(image, ax=axes[1::2], label="squared correlation\nwith the others' mean")
    figure.supxlabel("direction of the shared space, the largest variance first", fontsize=9)
    return figure


WHO = {"all": "all models", "some": "some", "one": "this one alone"}


def _shared(rows: Sequence[Row], curve: Sequence[Row]) -> Figure:
    """Draw, site by site, who has the directions that each model varies in, and what the first directions hold."""
    sites, names = grouped(rows, "site"), _names(curve)
    size = (3.6, 0.3 * len(names) + 1.4)
    figure, axes = panels(2 * len(sites), 2, size, (0.8, 0.8))
    for (site, of_site), bars, lines in zip(sites.items(), axes[::2], axes[1::2], strict=True):
        up, left = np.arange(len(of_site)), np.zeros(len(of_site))
        for number, (group, called) in enumerate(WHO.items()):
            share = np.array([row[group] for row in of_site])
            bars.barh(
                up,
                share,
                left=left,
                color=mpl.colormaps["viridis"](0.9 - 0.4 * number),
                label=called,
            )
            left += share
        bars.set_yticks(
            up, [f"{names[row['model']]} ({row['width']})" for row in of_site], fontsize=8
        )
        bars.invert_yaxis()
        bars.set_title(f"site {site}: who has its directions", fontsize=9)
        bars.set_xlabel("share of the variance")
        points = grouped(curve, "site")[site]
        for number, (name, row) in enumerate(zip(names, of_site, strict=True)):
            look: Look = {"color": COLOURS[number % len(COLOURS)], "linewidth": 1.3}
            lines.plot(
                [p["directions"] for p in points],
                [p[name] for p in points],
                label=names[name],
                **look,
            )
            lines.plot(
                [row["shared"]], [row["held"]], marker="o", linestyle="", color=look["color"]
            )
        lines.set(
            xlabel="directions, the most shared first",
            ylabel="share of the variance",
            ylim=(0, 1.02),
        )
        lines.set_title(f"site {site}: in the first directions", fontsize=9)
        lines.legend(fontsize=7, frameon=False, loc="lower right")
    axes[0].legend(fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.12), ncols=3)
    return figure
