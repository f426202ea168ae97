"""The report of a universe: every map i -> j, and what the directions of the shared space are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from aligners.fitting.outcomes import is_trained, mark, what_did_not_train, worst_of
from aligners.fitting.universe.universe import NETWORK
from aligners.reports.drawing import COLOURS, heat_map, layer_grid, panels, short
from aligners.reports.names import short_names, with_short_names
from aligners.reports.report import Report, Row

__all__ = ["report"]

SHARED = 0.5  # share of the others' variance along a direction above which a model is said to share it
FIGURES = ("fvu", "fvu_unseen", "round_trip", "cycle")
ACROSS = 4  # heat maps in a row


def report(meta: Row, rows: Sequence[Row], directions: Sequence[Row] = ()) -> Report:
    """Make the report from one row for each map, ordered pair of models and site.

    Args:
        meta: what holds for all rows.
        rows: of `UniverseEvaluation`.
        directions: for each site and direction of the space its variance, and what each model explains of it.
    """
    shown = with_short_names(rows)
    figures: dict[str, Callable[[], Figure]] = {
        f"universe_site_{site}": partial(_heat_maps, [row for row in shown if row["site_x"] == site])
        for site in _sites(rows)
    }
    return Report(
        "universe",
        meta,
        rows,
        tables={"directions": directions},
        figures={**figures, "directions": partial(_directions, directions, _names(directions))},
        screen=[_table(shown)],
        sentences=[*_means_in_words(shown), *_shared(directions), *what_did_not_train(shown)],
    )


def _sites(rows: Sequence[Row]) -> list[int]:
    return list(dict.fromkeys(row["site_x"] for row in rows))


def _names(directions: Sequence[Row]) -> dict[str, str]:
    """The models of the table of directions, and their short names."""
    return short_names(name for name in directions[0] if name not in ("site", "direction", "variance"))


def _mean(rows: Sequence[Row], column: str) -> float | None:
    values = [row[column] for row in rows if row[column] is not None]
    return float(np.mean(values)) if values else None


def _of(rows: Sequence[Row], **chosen: object) -> list[Row]:
    return [row for row in rows if all(row[column] == value for column, value in chosen.items())]


def _methods(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def _table(rows: Sequence[Row]) -> Table:
    """Means over all directions and sites."""
    table = Table(title="Mean over all ordered pairs of models and sites, held-out rows")
    table.add_column("maps")
    for column in ("parameters", *FIGURES):
        table.add_column(column.replace("_", " "), justify="right")
    for name in _methods(rows):
        own = _of(rows, method=name)
        values = [_mean(own, column) for column in FIGURES]
        texts = ["" if value is None else f"{value:.3g}" for value in values]
        table.add_row(mark(name, worst_of(own)), f"{own[0]['parameters']:,}" if own[0]["parameters"] else "", *texts)
    return table


def _means_in_words(rows: Sequence[Row]) -> list[str]:
    """Compare the universe with maps of pairs where both are trained, and say how exact its ways back are."""
    own = _of(rows, method=NETWORK)
    models, said = len({row["model_x"] for row in own}), []
    for name in _methods(rows):
        if name.startswith("pairwise_"):
            each = [{_place(row): row for row in part if is_trained(row)} for part in (own, _of(rows, method=name))]
            places = [place for place in each[0] if place in each[1]]
            ours, theirs = (_mean([part[place] for place in places], "fvu") for part in each)
            if ours is not None and theirs:
                said.append(
                    f"{models} maps into one space leave {ours:.3f} of the variance where {name} leaves {theirs:.3f}, "
                    f"{ours / theirs:.2f} times as much."
                )
    worst = max((row["cycle"] for row in own if row["cycle"] is not None), default=None)
    if worst is not None:
        trip = max(row["round_trip"] for row in own)
        said.append(
            f"From a model over two others back to it, states are off by at most {worst:.1e} of the largest value; "
            f"into the space and back by {trip:.1e}."
        )
    return said


def _place(row: Row) -> tuple[str, str, int]:
    return row["model_x"], row["model_y"], row["site_x"]


def _shared(directions: Sequence[Row]) -> list[str]:
    names = _names(directions)
    said = []
    for site in dict.fromkeys(row["site"] for row in directions):
        own = [[row[name] > SHARED for name in names] for row in directions if row["site"] == site]
        every, none = sum(map(all, own)), sum(not any(each) for each in own)
        some = len(own) - every - none
        said.append(
            f"Site {site}: of {len(own)} directions {every} are shared by all models, {some} by some, {none} by none "
            f"(a model shares one if it explains more than {SHARED:.0%} of the others' variance there)."
        )
    return said


def _heat_maps(rows: Sequence[Row]) -> Figure:
    """Draw FVU from every model into every other, a panel for each kind of maps."""
    names = list(dict.fromkeys(row["model_x"] for row in rows))
    methods = _methods(rows)
    size = (0.5 * len(names) + 1.0, 0.5 * len(names) + 0.6)
    figure, axes = panels(len(methods), ACROSS, size, (1.6, 0.8), boxed=True, sharey=True)
    top = min(1.0, max(row["fvu"] for row in rows if row["fvu"] is not None))
    for axis, name in zip(axes, methods, strict=True):
        own = _of(rows, method=name)
        grid = layer_grid(
            ((names.index(row["model_x"]), names.index(row["model_y"]), row["fvu"]) for row in own),
            range(len(names)),
            range(len(names)),
        )
        image = heat_map(axis, grid, range(len(names)), range(len(names)), high=top)
        mean = _mean(own, "fvu")
        title = mark(name, worst_of(own))
        axis.set_title(title if mean is None else f"{title}, mean {short(mean)}", fontsize=9)
        axis.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=7)
        axis.set_yticks(range(len(names)), names, fontsize=7)
    figure.colorbar(image, ax=axes, label="FVU", shrink=0.8, extend="max")
    figure.supylabel("from", fontsize=9)
    figure.supxlabel("into", fontsize=9)
    figure.suptitle(f"site {rows[0]['site_x']}", fontsize=10)
    return figure


def _directions(rows: Sequence[Row], names: dict[str, str]) -> Figure:
    """Draw, site by site, the variance along the space's directions, and what each model shares of them."""
    sites = list(dict.fromkeys(row["site"] for row in rows))
    figure, axes = panels(2 * len(sites), 2, (3.8, 0.2 * len(names) + 1.2), (1.0, 0.6), width_ratios=(1, 1.7))
    for site, variance, shares in zip(sites, axes[::2], axes[1::2], strict=True):
        own = [row for row in rows if row["site"] == site]
        places = [row["direction"] for row in own]
        variance.semilogy(places, [row["variance"] for row in own], color=COLOURS[0])
        variance.set_title(f"site {site}: variance of the models' mean", fontsize=9)
        grid = np.array([[row[name] for row in own] for name in names])
        extent = (0.5, len(own) + 0.5, len(names) - 0.5, -0.5)
        image = shares.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto", extent=extent)
        shares.set_yticks(range(len(names)), list(names.values()), fontsize=8)
        shares.set_title(f"site {site}: what each model shares with the others", fontsize=9)
    figure.colorbar(image, ax=axes[1::2], label="squared correlation\nwith the others' mean")
    figure.supxlabel("direction of the shared space, the largest variance first", fontsize=9)
    return figure
