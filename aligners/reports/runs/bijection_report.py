"""The report of the price of a bijection: learning curves with the floor, and the final price."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aligners.fitting.training_status import (
    is_trained,
    mark,
    what_did_not_train,
    worst_of,
)
from aligners.reports.drawing import (
    PANEL,
    Look,
    dress,
    line_of_maps,
    log_scale,
    method_looks,
    panels,
)
from aligners.reports.names import WORDS, aligned, blank, plain_number, with_short_names
from aligners.reports.report import (
    Report,
    Row,
    distinct,
    grouped,
    largest,
    mean,
    values,
    where,
)
from aligners.reports.screen import SiteTable

FREE, FLOOR = "mlp", "floor"
BIJECTIONS = (
    "inn",
    "inn_one_way",
    "inn_paper",
)  # the first whose price is known begins the page
DIRECTIONS = ("X to Y", "Y to X")
NAMES = WORDS["bijection"]
LARGEST = 2.0  # FVU; a map that is worse is off the scale
HIGHEST = 6.0  # price that the scale reaches up to
COLUMNS = [
    "FVU",
    "over seeds",
    "price",
    "seen",
    "unseen",
    "other text",
    "round trip",
    "stretch",
]
FVU = "FVU: share of variance left unexplained"


def report(meta: Row, rows: Sequence[Row]) -> Report:
    """Make the report from one row for each map, direction, size, number of steps, seed and site."""
    shown = with_short_names(rows)
    sizes = sorted(set(values(shown, "size")) - {0, None})
    named = []
    for row in shown:
        training = (
            f"{row['size']:,} parameters, {row['steps']:,} steps, seed {row['seed']}"
        )
        named.append(row | {"method": f"{NAMES[row['method']]} ({training})"})
    return Report(
        "bijection",
        meta,
        rows,
        figures={"bijection": partial(_figure, shown, sizes[-1])},
        screen=[_table(shown, size) for size in sizes],
        lead=lead(shown, sizes[-1]),
        sentences=_further_prices(shown, sizes[-1]) + what_did_not_train(named),
    )


# ---------------------------------------------------------------------- prices


def _of(rows: Iterable[Row], size: int, **wanted: object) -> list[Row]:
    """Return the rows of a size, with the closed forms, which have no size."""
    return [row for row in where(rows, **wanted) if row["size"] in (0, size)]


def _by_seed(rows: Iterable[Row], column: str) -> list[float]:
    """Return the mean of a column over sites, for each seed; NaN where a value is missing."""
    return [mean(line, column) for line in grouped(rows, "seed").values()]


def _last(rows: Sequence[Row], size: int, method: str, direction: str) -> list[Row]:
    """Return a map's rows after the most steps."""
    line = _of(rows, size, method=method, direction=direction)
    return where(line, steps=largest(line, "steps"))


def _price(
    rows: Sequence[Row], size: int, method: str, direction: str, column: str = "fvu"
) -> float:
    """Return a map's FVU after the most steps divided by the free network's, both as means over sites and seeds.

    NaN where one of the two is not trained.
    """
    line = _last(rows, size, method, direction)
    free = _last(rows, size, FREE, direction)
    if not all(map(is_trained, line + free)):
        return math.nan
    return float(np.mean(_by_seed(line, column)) / np.mean(_by_seed(free, column)))


def _prices(rows: Sequence[Row], size: int) -> dict[str, tuple[float, float]]:
    """Return the prices of each map in both directions, in the order of `words.yaml`."""
    there, back = DIRECTIONS
    prices = {}
    for name in _methods(rows):
        prices[name] = _price(rows, size, name, there), _price(rows, size, name, back)
    return prices


def _methods(rows: Iterable[Row]) -> list[str]:
    """Return the maps of the report, in the order of `words.yaml`."""
    return sorted(distinct(rows, "method"), key=list(NAMES).index)


def _leading(prices: Mapping[str, tuple[float, float]]) -> str:
    """Return the bijection whose price is given first; empty if no price is known."""
    for name in BIJECTIONS:
        if math.isfinite(sum(prices.get(name, (math.nan,)))):
            return name
    return ""


# ---------------------------------------------------------------------- what is said


def lead(rows: Sequence[Row], size: int) -> str:
    """Say what being invertible costs in both directions, with the errors that the price is made of.

    Args:
        rows: rows of the report, with short names of models.
        size: the most parameters.
    """
    x = rows[0]["model_x"]
    y = rows[0]["model_y"]
    steps = largest(rows, "steps")
    prices = _prices(rows, size)
    name = _leading(prices)
    if not name:
        return (
            f"Invertible networks and a free network (MLP) of {size:,} parameters were trained between {x} and {y} for "
            f"{steps:,} steps. Not all of them trained at every site, so the price of being invertible is not known."
        )
    there, back = prices[name]
    own = _error(rows, size, name)
    free = _error(rows, size, FREE)
    alike = f"with as many parameters ({size:,}) and steps ({steps:,})"
    price = f"{_times(there)} that of a free network (MLP) {alike}, and {_times(back)} on the way back"
    return (
        f"From {x} to {y} the FVU of an invertible network ({NAMES[name]}) is {price}: this is the price of being "
        f"invertible. On held-out rows the FVU of the first is {own}, that of the second {free}."
    )


def _times(ratio: float) -> str:
    if ratio < 100:
        return f"{ratio:.2f} times"
    return f"{plain_number(ratio)} times"


def _error(rows: Sequence[Row], size: int, method: str) -> str:
    """State the FVU of a map from X to Y, and its range over seeds."""
    line = _last(rows, size, method, DIRECTIONS[0])
    text = f"{mean(line, 'fvu'):.3f}"
    seeds = _by_seed(line, "fvu")
    if len(seeds) == 1:
        return text
    return f"{text} ({min(seeds):.3f} to {max(seeds):.3f} over {len(seeds)} seeds)"


def _further_prices(rows: Sequence[Row], size: int) -> list[str]:
    """State the prices of other bijections, the floor, and prices on unseen types and on another text."""
    said = []
    prices = _prices(rows, size)
    for name, (there, back) in prices.items():
        if name == _leading(prices) or not math.isfinite(there + back):
            continue
        if name in BIJECTIONS:
            ratio = f"{_times(there)} the FVU of an MLP of equal size and steps"
            said.append(f"{NAMES[name]}: {ratio}, {_times(back)} from Y to X.")
        elif name == FLOOR:
            said.append(
                f"Floor of maps that work in both directions: {there:.2f} and {back:.2f} times the FVU of the MLP. It "
                "is what the MLP leaves, plus what it costs to restore the target's covariance; a better prediction "
                "than the MLP's would lower it."
            )
    for place, column in WORDS["elsewhere"].items():
        parts = []
        for name in prices:
            price = _price(rows, size, name, DIRECTIONS[0], column)
            if name not in (FREE, FLOOR) and not math.isnan(price):
                parts.append(f"{NAMES[name]} {price:.2f}")
        if parts:
            said.append(
                f"From X to Y, the same ratios on {place} are: {', '.join(parts)}."
            )
    return said


# ---------------------------------------------------------------------- table


def _table(rows: Sequence[Row], size: int) -> SiteTable:
    """Make a table of what each map reaches with the most steps, a line for each direction."""
    models = f"{rows[0]['model_x']} (X) and {rows[0]['model_y']} (Y)"
    trained = f"{size:,} parameters, {largest(rows, 'steps'):,} steps"
    title = f"{models}, held-out rows, mean over sites; {trained}"
    table = SiteTable(title, ["map", "direction"], COLUMNS, {})
    for method, prices in _prices(rows, size).items():
        for direction, price in zip(DIRECTIONS, prices, strict=True):
            cells = _cells(_last(rows, size, method, direction), price)
            table.add_row(NAMES[method], direction, *cells)
    return table


def _cells(rows: Sequence[Row], price: float) -> list[str]:
    """Return the table's cells for a map in one direction."""
    fvus = _by_seed(rows, "fvu")
    trip = largest(rows, "round_trip")
    low = mean(rows, "stretch_low")
    high = mean(rows, "stretch_high")
    cells = [mark(aligned(float(np.mean(fvus))), worst_of(rows))]
    cells.append(
        f"{aligned(min(fvus))} to {aligned(max(fvus))}" if len(fvus) > 1 else ""
    )
    cells.append(aligned(price, 2))
    for column in ("fvu_seen", "fvu_unseen", "fvu_other"):
        cells.append(aligned(mean(rows, column)))
    cells.append(blank(trip, ".1e"))
    if not math.isnan(low):
        cells.append(f"{low:.2g} to {high:.2g}")
    return cells


# ---------------------------------------------------------------------- figures


def _look(method: str) -> Look:
    return method_looks([method])[method]


def _figure(rows: Sequence[Row], size: int) -> Figure:
    """Draw FVU against steps for each direction, then the price of each map in the end."""
    figure, (left, middle, right) = panels(3, 3, PANEL, (2.6, 0.9))
    x = rows[0]["model_x"]
    y = rows[0]["model_y"]
    _curves(left, _of(rows, size, direction=DIRECTIONS[0]), f"{x} → {y}")
    _curves(middle, _of(rows, size, direction=DIRECTIONS[1]), f"{y} → {x}")
    _draw_prices(right, _prices(rows, size))
    across = "training steps (left, middle); direction (right)"
    dress(figure, [left, middle, right], across, FVU)
    return figure


def _curves(axis: Axes, rows: Sequence[Row], title: str) -> None:
    """Draw the mean over seeds of each map's FVU, with the range over seeds, above the least floor."""
    for method in _methods(rows):
        places = sorted(grouped(where(rows, method=method), "steps").items())
        if method == "linear":
            means = [np.mean(_by_seed(line, "fvu")) for _, line in places]
            look = {
                "label": NAMES[method],
                "color": _look(method)["color"],
                "linestyle": ":",
            }
            axis.axhline(float(np.mean(means)), **look)
        elif method == FLOOR:
            least = min(float(np.mean(_by_seed(line, "fvu"))) for _, line in places)
            words = "below the floor of maps\nthat work in both directions"
            axis.axhspan(1e-6, least, color="0.9", zorder=0, label=words)
        else:
            _curve(axis, method, dict(places))
    ticks = sorted(set(values(rows, "steps")) - {0})
    axis.set_xscale("log")
    log_scale([axis])
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.set_title(title, fontsize=10)


def _curve(axis: Axes, method: str, places: Mapping[int, list[Row]]) -> None:
    """Draw the part of one map's FVU that is on the scale, with a note if none of it is."""
    means = []
    below = []
    above = []
    for line in places.values():
        fvus = _by_seed(line, "fvu")
        means.append(float(np.mean(fvus)))
        below.append(means[-1] - min(fvus))
        above.append(max(fvus) - means[-1])
    shown = [value if value <= LARGEST else math.nan for value in means]
    worst = [worst_of(line) for line in places.values()]
    look = _look(method)
    line_of_maps(axis, list(places), shown, worst, NAMES[method], look, [below, above])
    if not any(map(math.isfinite, shown)):
        text = f"{NAMES[method]}: off the scale ({aligned(means[-1])})"
        place: Look = {"xycoords": "axes fraction", "va": "top", "fontsize": 7}
        axis.annotate(text, (0.03, 0.97), color=look["color"], **place)


def _number_at_end(axis: Axes, left: float, price: float, top: float) -> None:
    """Write a price at the end of its bar, inside where the bar ends at the top of the panel."""
    look: Look = {"va": "bottom"}
    if price > top:
        box = {"facecolor": "w", "edgecolor": "none", "pad": 0.5}
        look = {"va": "top", "rotation": 90, "bbox": box}
    height = min(price, 0.98 * top)
    axis.text(left, height, aligned(price, 2), ha="center", fontsize=6, **look)


def _draw_prices(axis: Axes, prices: Mapping[str, tuple[float, float]]) -> None:
    """Draw the price of each map in both directions; those off the scale as a number at its end."""
    shown = {name: both for name, both in prices.items() if name != FREE}
    on_scale = [price for price in sum(shown.values(), ()) if price <= HIGHEST]
    top = 1.15 * max([1.5, *on_scale])
    width = 0.8 / len(shown)
    for place, (name, both) in enumerate(shown.items()):
        colour = "0.7" if name == FLOOR else _look(name)["color"]
        for at, price in enumerate(both):
            if math.isnan(price):  # one of the two did not train
                continue
            left = at + width * place - 0.4
            axis.bar(left, min(price, top), width, color=colour)
            _number_at_end(axis, left, price, top)
    axis.axhline(1, color=_look(FREE)["color"], linewidth=1.3)
    axis.set_ylim(0, top)
    axis.set_xticks(range(2), list(DIRECTIONS))
    axis.set_title("price: FVU over that of the MLP", fontsize=10)
