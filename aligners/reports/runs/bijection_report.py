"""The report of what being a bijection costs: learning curves beside the floor, and the price in the end."""

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aligners.fitting.training_status import is_trained, mark, what_did_not_train, worst_of
from aligners.reports.drawing import (
    PANEL,
    Look,
    dress,
    line_of_maps,
    log_scale,
    method_looks,
    panels,
)
from aligners.reports.names import WORDS, aligned, with_short_names
from aligners.reports.report import Report, Row, distinct, grouped, largest, mean, where
from aligners.reports.screen import SiteTable
from aligners.reports.templates import sentences

FREE, FLOOR = "mlp", "floor"
DIRECTIONS = ("X to Y", "Y to X")
NAMES = WORDS["bijection"]
LARGEST = 2.0  # FVU; a map that is worse is off the scale


def report(meta: Row, rows: Sequence[Row]) -> Report:
    """Make the report from one row for each map, direction, size, number of steps, seed and site."""
    shown = with_short_names(rows)
    sizes = sorted({row["size"] for row in shown if row["size"]})
    figures = {"bijection": partial(_figure, shown, sizes[-1])}
    if len(sizes) > 1:
        figures["bijection_sizes"] = partial(_sizes_figure, shown, sizes)
    tables = [_table(shown, size) for size in sizes]
    about = {"prices": _prices(shown, sizes[-1]), "price": partial(_price, shown, sizes[-1])}
    untrained = what_did_not_train([row | {"method": _name(row)} for row in shown])
    findings = [*sentences("bijection", **about), *untrained]
    return Report("bijection", meta, rows, figures=figures, screen=tables, sentences=findings)


def _name(row: Row) -> str:
    """A map with the size, steps and seed of its training."""
    return f"{NAMES[row['method']]} ({row['size']:,} parameters, {row['steps']:,} steps, seed {row['seed']})"


def _of(rows: Iterable[Row], size: int, **wanted: object) -> list[Row]:
    """Rows of a size, and of closed forms, which have none."""
    return [row for row in where(rows, **wanted) if row["size"] in (0, size)]


def _by_seed(rows: Iterable[Row], column: str) -> list[float]:
    """The mean of a column over sites, for each seed; NaN where one is no number."""
    return [mean(seed_rows, column) for seed_rows in grouped(rows, "seed").values()]


def _last(rows: Sequence[Row], size: int, method: str, direction: str) -> list[Row]:
    """A map's rows after the most steps."""
    map_rows = _of(rows, size, method=method, direction=direction)
    return where(map_rows, steps=largest(map_rows, "steps"))


def _price(
    rows: Sequence[Row], size: int, method: str, direction: str, column: str = "fvu"
) -> float:
    """The FVU of a map after the most steps over that of the free network, both means over sites and seeds.

    NaN where one of the two is not trained.
    """
    bijective, free = (_last(rows, size, name, direction) for name in (method, FREE))
    if not all(map(is_trained, [*bijective, *free])):
        return float("nan")
    return float(np.mean(_by_seed(bijective, column)) / np.mean(_by_seed(free, column)))


def _prices(rows: Sequence[Row], size: int) -> dict[str, list[float]]:
    """The prices of each map in both directions."""
    return {
        name: [_price(rows, size, name, direction) for direction in DIRECTIONS]
        for name in _methods(rows)
    }


def _methods(rows: Iterable[Row]) -> list[str]:
    """Those of the report, in the order of `words.yaml`."""
    return sorted(distinct(rows, "method"), key=list(NAMES).index)


def _table(rows: Sequence[Row], size: int) -> SiteTable:
    """Make a table of what each map reaches with the most steps, a line for each direction."""
    models = f"{rows[0]['model_x']} (X) and {rows[0]['model_y']} (Y)"
    title = f"{models}, held-out rows, mean over sites; {size:,} parameters, {largest(rows, 'steps'):,} steps"
    columns = [
        "FVU",
        "over seeds",
        "price",
        "seen",
        "unseen",
        "other text",
        "round trip",
        "stretch",
    ]
    table = SiteTable(title, ["map", "direction"], columns, {})
    for method, prices in _prices(rows, size).items():
        for direction, price in zip(DIRECTIONS, prices, strict=True):
            table.add_row(
                NAMES[method], direction, *_cells(_last(rows, size, method, direction), price)
            )
    return table


def _cells(rows: Sequence[Row], price: float) -> list[str]:
    """What a line of the table says of a map in one direction."""
    fvu, trip = _by_seed(rows, "fvu"), largest(rows, "round_trip")
    low, high = mean(rows, "stretch_low"), mean(rows, "stretch_high")
    return [
        mark(aligned(float(np.mean(fvu))), worst_of(rows)),
        f"{aligned(min(fvu))} to {aligned(max(fvu))}" if len(fvu) > 1 else "",
        aligned(price, 2),
        *(aligned(mean(rows, column)) for column in ("fvu_seen", "fvu_unseen", "fvu_other")),
        "" if trip is None else f"{trip:.1e}",
        "" if np.isnan(low) else f"{low:.2g} to {high:.2g}",
    ]


# ---------------------------------------------------------------------- figures


def _look(method: str) -> Look:
    return method_looks([method])[method]


def _figure(rows: Sequence[Row], size: int) -> Figure:
    """Draw FVU against steps for each direction, then the price of each map in the end."""
    figure, axes = panels(3, 3, PANEL, (2.6, 0.9))
    models = [rows[0]["model_x"], rows[0]["model_y"]]
    for axis, direction, names in zip(axes, DIRECTIONS, (models, models[::-1]), strict=False):
        _curves(axis, _of(rows, size, direction=direction), "steps")
        axis.set_title(" → ".join(names), fontsize=10)
    _draw_prices(axes[2], rows, size)
    dress(
        figure,
        axes,
        "training steps (left, middle); direction (right)",
        "FVU: share of variance left unexplained",
    )
    return figure


def _curves(axis: Axes, rows: Sequence[Row], across: str) -> None:
    """Draw the mean over seeds of each map's FVU, with the range over seeds, above the least floor."""
    for method in _methods(rows):
        at = dict(sorted(grouped(where(rows, method=method), across).items()))
        values = [_by_seed(place_rows, "fvu") for place_rows in at.values()]
        if method == "linear":
            axis.axhline(
                float(np.mean(values)),
                label=NAMES[method],
                color=_look(method)["color"],
                linestyle=":",
            )
        elif method == FLOOR:
            least, name = (
                min(np.mean(fvus) for fvus in values),
                "below the floor of maps\nthat work in both directions",
            )
            axis.axhspan(1e-6, float(least), color="0.9", zorder=0, label=name)
        else:
            _curve(axis, method, at, values)
    places = sorted({row[across] for row in rows if row["method"] != "linear"})
    axis.set_xscale("log")
    log_scale([axis])
    axis.set_xticks(places, [f"{place:,}" for place in places])


def _curve(
    axis: Axes, method: str, at: dict[int, list[Row]], values: Sequence[Sequence[float]]
) -> None:
    """Draw one map's FVU as far as it is on the scale, and say so where none of it is."""
    middle = np.array([np.mean(fvus) for fvus in values])
    bars = [middle - [min(fvus) for fvus in values], [max(fvus) for fvus in values] - middle]
    shown = np.where(middle <= LARGEST, middle, np.nan)
    worst = [worst_of(rows) for rows in at.values()]
    line_of_maps(axis, list(at), list(shown), worst, NAMES[method], _look(method), bars)
    if np.isnan(shown).all():
        text, color = (
            f"{NAMES[method]}: off the scale ({aligned(middle[-1])})",
            _look(method)["color"],
        )
        axis.annotate(
            text, (0.03, 0.97), xycoords="axes fraction", color=color, fontsize=7, va="top"
        )


def _draw_prices(axis: Axes, rows: Sequence[Row], size: int) -> None:
    """Draw the price of each map in both directions; those off the scale as a number at its end."""
    prices = {name: both for name, both in _prices(rows, size).items() if name != FREE}
    top = 1.15 * max([1.5, *(value for both in prices.values() for value in both if value <= 6)])
    for place, (name, both) in enumerate(prices.items()):
        color = "0.7" if name == FLOOR else _look(name)["color"]
        for at, value in enumerate(both):
            if np.isnan(value):  # one of the two did not train
                continue
            left, height, beyond = (
                at + 0.8 * (place / len(prices) - 0.5),
                min(value, top),
                value > top,
            )
            axis.bar(left, height, 0.8 / len(prices), color=color)
            axis.text(left, min(height, 0.98 * top), aligned(value, 2), ha="center",
                      va="top" if beyond else "bottom", fontsize=6, rotation=90 if beyond else 0,
                      bbox={"facecolor": "w", "edgecolor": "none", "pad": 0.5} if beyond else None)  # fmt: skip
    axis.axhline(1, color=_look(FREE)["color"], linewidth=1.3)
    axis.set_ylim(0, top)
    axis.set_xticks(range(2), list(DIRECTIONS))
    axis.set_title("price: FVU over that of the MLP", fontsize=10)


def _sizes_figure(rows: Sequence[Row], sizes: Sequence[int]) -> Figure:
    """Draw FVU after the most steps against parameters, for each direction."""
    figure, axes = panels(2, 2, PANEL, (2.6, 0.9))
    for axis, direction in zip(axes, DIRECTIONS, strict=True):
        ends = [
            row
            for size in sizes
            for name in _methods(rows)
            for row in _last(rows, size, name, direction)
        ]
        _curves(axis, [row | {"size": row["size"] or sizes[0]} for row in ends], "size")
        axis.set_title(direction, fontsize=10)
    dress(figure, axes, "parameters of a site", "FVU: share of variance left unexplained")
    return figure
