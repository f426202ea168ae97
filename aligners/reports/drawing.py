"""What all figures share: colours, panels, lines by site, heat maps, legends."""

import math
from collections.abc import Callable, Iterable, Sequence
from textwrap import fill
from typing import Any, NamedTuple, TypeVar

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import LogLocator, MaxNLocator
from numpy.typing import ArrayLike, NDArray

from aligners.files.yaml_tables import table_beside
from aligners.fitting.training_status import is_trained
from aligners.reports.names import site_name
from aligners.reports.report import Row, number

Look = dict[str, Any]
Cells = Sequence[Row | None]
Level = tuple[str | None, Look, float]  # name, look and height of what has no site
Line = TypeVar("Line")

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8C6D31",
)
# Tol's muted scheme, likewise: of models, groups and variants, so that no colour of a method means one of them.
MODEL_COLOURS = (
    "#332288",
    "#CC6677",
    "#117733",
    "#999933",
    "#AA4499",
    "#44AA99",
    "#882255",
    "#88CCEE",
)
MARKERS = (
    "osD^vPX*h"  # one more than there are colours, so that pairs of both repeat late
)
LOOKS = table_beside(__file__, "looks.yaml")
METHODS, FLOORS = (
    list(LOOKS["methods"]),
    LOOKS["floors"],
)  # each has one look in all figures
ABREAST, PANEL = (
    4,
    (3.6, 2.9),
)  # of figures by site: most panels in a row, and their size in inches
LINEAR_UP_TO = 0.01  # nats: what stitching a model to itself costs at most
LIGHT_FROM = (
    0.6  # share of the colour scale above which dark letters are easier to read
)
MOST_LINES = 6  # in a panel
STEP_ASIDE, MOST_ASIDE = (
    0.02,
    0.05,
)  # of the distance between two sites: how far lines are moved to tell bars apart
LETTERS = 46  # that fit below a panel
FEWEST_ACROSS = 3  # places that a panel has room for: fewer stay in the middle
LEGEND_BESIDE = (
    28  # letters of a legend's longest name, above which it stands below the panels
)
LEGEND_WIDTH = 1.6  # inches that it takes beside them
HOLLOW = "hollow: untrained start, or diverged"  # what `line_of_maps` draws
QUIET, ON_QUIET = "0.85", "0.45"  # of a cell that says nothing, and of its number
WRITTEN = 48  # cells, above which a figure has no room for numbers


def panels(
    count: int,
    abreast: int,
    size: tuple[float, float],
    margins: tuple[float, float],
    *,
    boxed: bool = False,
    font: float = 9,
    **options: Any,
) -> tuple[Figure, list[Axes]]:
    """Make a figure of `count` panels, filled row by row.

    Args:
        count: number of panels.
        abreast: most panels in a row.
        size: width and height of a panel in inches.
        margins: width and height in inches of what surrounds the panels.
        boxed: whether a panel has a frame on all four sides.
        font: its size in points.
        options: options of `Figure.subplots`, such as `sharey`.
    """
    across = min(abreast, count)
    down = math.ceil(count / across)
    width = size[0] * across + margins[0]
    height = size[1] * down + margins[1]
    look: Any = {
        "axes.spines.top": boxed,
        "axes.spines.right": boxed,
        "font.size": font,
        "axes.formatter.useoffset": False,
    }
    with mpl.rc_context(look):
        figure = Figure(figsize=(width, height), layout="constrained")
        grid = figure.subplots(down, across, squeeze=False, **options)
    axes = list(grid.flat)
    for axis in axes[count:]:
        axis.set_axis_off()
    for axis in axes[
        max(0, count - across) : count
    ]:  # also where the place below is empty
        axis.tick_params(labelbottom=True)
    return figure, axes[:count]


# ---------------------------------------------------------------------- lines


def line_look(
    colour: int, marker: int, linestyle: str, colours: Sequence[str] = COLOURS
) -> Look:
    """Return how to draw a line. Colours and markers are numbers, which start again when they run out."""
    return {
        "color": colours[colour % len(colours)],
        "marker": MARKERS[marker % len(MARKERS)],
        "linestyle": linestyle,
        "markersize": 4.5,
        "linewidth": 1.3,
    }


def method_looks(names: Iterable[str]) -> dict[str, Look]:
    """Return how to draw each method: known ones look the same in every figure, others take what is left.

    Args:
        names: names of the methods of a figure.
    """
    colours = list(LOOKS["methods"].values())
    floors = list(FLOORS)
    looks = {}
    others = 0
    for name in names:
        if name in FLOORS:
            looks[name] = line_look(0, floors.index(name) + 6, ":")
            looks[name]["color"] = FLOORS[name]
        elif name in METHODS:
            place = METHODS.index(name)
            looks[name] = line_look(place, place, "-", colours)
        else:
            looks[name] = line_look(others, others + others // len(COLOURS) + 3, "-.")
            others += 1
    return looks


def line_of_maps(
    axis: Axes,
    across: Sequence[float],
    heights: Sequence[float],
    rows: Sequence[Row],
    name: str | None,
    look: Look,
    bars: ArrayLike | None = None,
) -> bool:
    """Draw a line; the points of maps that are not trained are hollow.

    Args:
        axis: the panel.
        across: the place of each row.
        heights: of the points.
        rows: what the points are of.
        name: in the legend; None: it is not there.
        look: of the line.
        bars: (2, rows) how far intervals reach down and up, if there are any.

    Returns:
        Whether any point is hollow.
    """
    axis.errorbar(across, heights, bars, label=name, elinewidth=0.8, **look)
    places, values = [], []
    for place, height, row in zip(across, heights, rows, strict=True):
        if not is_trained(row):
            places.append(place)
            values.append(height)
    hollow = {
        **look,
        "linestyle": "none",
        "markerfacecolor": "white",
        "markersize": 8,
        "zorder": 3,
    }
    axis.plot(places, values, **hollow)
    return bool(places)


def lines_by_site(
    axis: Axes, lines: Sequence[tuple[str, Look, Cells]], column: str, scale: float = 1
) -> None:
    """Draw lines with their intervals, moved aside a little so that these can be told apart.

    Args:
        axis: the panel.
        lines: name, look, and a row or None for each place across.
        column: the rows' column; COLUMN_low and COLUMN_high are the ends of its interval, where there is one.
        scale: factor for all values.
    """
    step = min(STEP_ASIDE, 2 * MOST_ASIDE / max(1, len(lines)))
    for order, (name, look, cells) in enumerate(lines):
        aside = step * (order - (len(lines) - 1) / 2)
        across, rows = [], []
        for place, row in enumerate(cells):
            if row is not None:
                across.append(place + aside)
                rows.append(row)
        if not rows:
            continue
        middle = _column(rows, column, scale)
        low = _column(rows, f"{column}_low", scale)
        high = _column(rows, f"{column}_high", scale)
        bars = None
        if not np.isnan(
            low
        ).all():  # a percentile interval may miss the estimate; the bar then ends there
            bars = np.maximum([middle - low, high - middle], 0)
        line_of_maps(axis, across, list(middle), rows, name, look, bars)


def _column(rows: Sequence[Row], column: str, scale: float) -> NDArray[np.float64]:
    """Return the scaled values of a column; NaN where there is none."""
    return scale * np.array([number(row.get(column)) for row in rows])


class SitePanel(NamedTuple):
    """A panel of `site_figure`.

    Attributes:
        title: above it.
        pairs: the site pairs on the horizontal axis.
        lines: name, look, and a row or None for each site pair.
        levels: name or None, look and height of what has no site.
    """

    title: str
    pairs: Sequence[tuple[int, int]]
    lines: Sequence[tuple[str, Look, Cells]]
    levels: Sequence[Level] = ()

    def all_trained(self) -> bool:
        """Tell whether every map of the panel's lines is trained."""
        for _, _, cells in self.lines:
            for row in cells:
                if row is not None and not is_trained(row):
                    return False
        return True


def site_figure(
    shown: Sequence[SitePanel],
    column: str,
    up: str,
    scale: float = 1,
    across: str = "site (layer)",
    note: str = "",
) -> Figure:
    """Draw a column of rows against site, with intervals and levels.

    Args:
        shown: the panels.
        column: see `lines_by_site`; a `penalty` gets its own scale.
        up: label of the vertical axes.
        scale: factor for all values.
        across: label of the horizontal axes.
        note: a line above the legend.
    """
    figure, axes = panels(len(shown), ABREAST, PANEL, (2.0, 0.8), sharey=True)
    for axis, panel in zip(axes, shown, strict=True):
        lines_by_site(axis, panel.lines, column, scale)
        for name, look, height in panel.levels:
            axis.axhline(scale * height, label=name, zorder=0, **look)
        name_sites(axis, panel.title, map(site_name, panel.pairs))
        if not panel.all_trained() and HOLLOW not in note:
            note = f"{note}\n{HOLLOW}".strip()
    if column == "penalty":
        penalty_scale(axes)
    dress(figure, axes, across, up, note)
    return figure


def name_sites(
    axis: Axes, title: str, sites: Iterable[str], letters: int = LETTERS
) -> None:
    """Give a panel its title, and its horizontal axis the names of sites, as many as there is room for."""
    lines = [fill(line, letters, break_long_words=False) for line in title.split("\n")]
    axis.set_title("\n".join(lines), fontsize=10)
    names = list(sites)
    length = sum(map(len, names)) + 2 * len(names)
    every = math.ceil(length / letters)
    axis.set_xticks(range(0, len(names), every), names[::every])
    room = max(0, FEWEST_ACROSS - len(names)) / 2
    axis.set_xlim(-0.5 - room, len(names) - 0.5 + room)


def shared_out(groups: Iterable[Sequence[Line]]) -> list[list[Line]]:
    """Share lines out to panels, so that none has more than `MOST_LINES`.

    Args:
        groups: lines, or their names, that are better seen together; neighbours that fit share a panel.
    """
    shared: list[list[Line]] = []
    for group in groups:
        for first in range(0, len(group), MOST_LINES):
            part = group[first : first + MOST_LINES]
            if not shared or len(shared[-1]) + len(part) > MOST_LINES:
                shared.append([])
            shared[-1] += part
    return shared


def evenly(lines: Sequence[Line]) -> list[list[Line]]:
    """Divide lines of one kind among as few panels as can be read, each with about as many."""
    count = math.ceil(len(lines) / MOST_LINES)
    size = math.ceil(len(lines) / max(1, count))
    return [
        list(lines[first : first + size])
        for first in range(0, len(lines), max(1, size))
    ]


# ---------------------------------------------------------------------- heat maps


def heat_map(
    axis: Axes,
    grid: NDArray[np.float64],
    rows: Sequence[object],
    columns: Sequence[object],
    low: float = 0,
    high: float = 1,
    written: int = WRITTEN,
    font: float | None = None,
    unit: float = 1,
    quiet: NDArray[np.bool_] | None = None,
) -> AxesImage:
    """Draw a value for each pair of layers; the first row is at the bottom.

    Args:
        axis: the panel.
        grid: (rows, columns) values; NaN leaves a cell empty.
        rows: the layers of the vertical axis.
        columns: the layers of the horizontal axis.
        low: the dark end of the colour scale.
        high: the bright end, which may be below the other.
        written: cells of a side up to which the values stand in the cells.
        font: size of the values; default: what there is room for.
        unit: the values stand in the cells as multiples of it.
        quiet: (rows, columns) which cells are grey instead.
    """
    if quiet is None:
        quiet = np.zeros(grid.shape, dtype=bool)
    colours = "viridis" if low < high else "viridis_r"
    ends: Look = {"vmin": min(low, high), "vmax": max(low, high)}
    image = axis.imshow(grid, origin="lower", aspect="equal", cmap=colours, **ends)
    grey = np.ma.masked_where(~quiet, np.zeros(grid.shape))
    axis.imshow(grey, origin="lower", aspect="equal", cmap=ListedColormap([QUIET]))
    side = max(grid.shape)
    size = font or (7 if side <= 8 else 5.5)
    for (i, j), value in np.ndenumerate(grid):
        if side > written or not np.isfinite(value):
            continue
        bright = (value - low) / (high - low) >= LIGHT_FROM
        colour = "k" if bright else "w"
        if quiet[i, j]:
            colour = ON_QUIET
        place: Look = {"ha": "center", "va": "center"}
        axis.text(j, i, short(value / unit), fontsize=size, color=colour, **place)
    axis.set_xticks(range(len(columns)), list(map(str, columns)))
    axis.set_yticks(range(len(rows)), list(map(str, rows)))
    axis.tick_params(length=0)
    return image


def heat_maps(
    axes: Sequence[Axes],
    titles: Iterable[str],
    cells: Iterable[Iterable[Row]],
    columns: tuple[str, str, str],
    up: Sequence[object],
    across: Sequence[object],
    low: float = 0,
    high: float = 1,
    quiet: Callable[[Row], bool] | None = None,
    **bar: Any,
) -> None:
    """Draw heat maps of the same layers with one colour scale, and its bar beside them.

    Args:
        axes: the panels.
        titles: of the panels.
        cells: the rows of each.
        columns: see `layer_grid`.
        up: likewise.
        across: likewise.
        low: see `heat_map`.
        high: likewise.
        quiet: which cells are grey instead.
        bar: options of `Figure.colorbar`.
    """
    for axis, title, own in zip(axes, titles, cells, strict=True):
        rows = list(own)
        grid = layer_grid(rows, columns, up, across)
        grey = None
        if quiet is not None:
            grey = quiet_cells(rows, columns, up, across, quiet)
        image = heat_map(axis, grid, up, across, low, high, quiet=grey)
        axis.set_title(title, fontsize=9)
    axes[0].figure.colorbar(image, ax=axes, **bar)


def quiet_cells(
    cells: Iterable[Row],
    columns: tuple[str, str, str],
    up: Sequence[Any],
    across: Sequence[Any],
    quiet: Callable[[Row], bool],
) -> NDArray[np.bool_]:
    """Return for `heat_map` which cells are grey; arguments as of `layer_grid`."""
    *places, _ = columns
    marked = [row | {"quiet": float(quiet(row))} for row in cells]
    grid = layer_grid(marked, (places[0], places[1], "quiet"), up, across)
    return grid == 1


def layer_grid(
    cells: Iterable[Row],
    columns: tuple[str, str, str],
    up: Sequence[Any],
    across: Sequence[Any],
) -> NDArray[np.float64]:
    """Arrange values by layer for `heat_map`; NaN where there is none.

    Args:
        cells: rows.
        columns: those of the layer of the vertical axis, of the layer of the horizontal axis, and of the value.
        up: the layers of the vertical axis.
        across: the layers of the horizontal axis.
    """
    grid = np.full((len(up), len(across)), np.nan)
    layer_up, layer_across, value = columns
    for row in cells:
        place = up.index(row[layer_up]), across.index(row[layer_across])
        grid[place] = number(row[value])
    return grid


def short(value: float) -> str:
    """Write a value into a cell: .48, 1.0, 48.0, 100, 5e+03."""
    size = abs(value)
    if size < 0.995:
        return f"{value:z.2f}".replace("0.", ".", 1)
    if size < 99.95:
        return f"{value:.1f}"
    if size < 999.5:
        return f"{value:.0f}"
    return f"{value:.0e}"


# ---------------------------------------------------------------------- labels, legends and scales


def label(figure: Figure, across: str, up: str, title: str = "") -> None:
    """Label the axes of all panels together, and give the figure a title."""
    figure.supxlabel(across, fontsize=9)
    figure.supylabel(up, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=10)


def shown_lines(axes: Iterable[Axes]) -> tuple[list[Any], list[str]]:
    """Return handles and names for one legend with every line that any panel shows."""
    shown: dict[str, Any] = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            shown.setdefault(name, handle)
    return list(shown.values()), list(shown)


def dress(
    figure: Figure, axes: Sequence[Axes], across: str, up: str, note: str = ""
) -> None:
    """Label the axes of all panels together, and add one legend for all: below them, where its names are long."""
    handles, names = shown_lines(axes)
    below = max(map(len, names), default=0) > LEGEND_BESIDE
    if below or len(axes) == 1:
        for axis in axes:  # a label of the whole figure would stand between panels and legend, or upon it
            axis.set_xlabel(across, fontsize=9)
    else:
        figure.supxlabel(across, fontsize=9)
    figure.supylabel(up, fontsize=9)
    place: Look = {"loc": "outside right center"}
    if below:
        place = {"loc": "outside lower center", "ncols": _legend_below(figure, names)}
    look: Look = {"frameon": False, "fontsize": 8, "title_fontsize": 7.5}
    figure.legend(handles, names, title=note or None, **look, **place)


def _legend_below(figure: Figure, names: Sequence[str]) -> int:
    """Make room below the panels for a legend, instead of beside them; return how many names go abreast."""
    width, height = figure.get_size_inches()
    width = max(width - LEGEND_WIDTH, 5.0)
    longest = max(map(len, names))
    abreast = max(1, int(width / (0.065 * longest + 0.5)))
    figure.set_size_inches(width, height + 0.3 + 0.17 * math.ceil(len(names) / abreast))
    return abreast


def log_scale(axes: Sequence[Axes]) -> None:
    """Make the shared vertical scale of panels logarithmic, with plain numbers at its ticks, and room for all lines.

    Draw all lines first: the scale does not adapt to later ones.
    """
    heights = []
    for axis in axes:
        for line in axis.lines:
            heights.append(np.asarray(line.get_ydata(), float))
    drawn = np.concatenate(heights)
    drawn = drawn[np.isfinite(drawn) & (drawn > 0)]
    decades = math.log10(drawn.max() / drawn.min())
    for axis in axes:
        axis.set_yscale("log")
        axis.minorticks_off()
        if decades < 1:
            axis.yaxis.set_major_locator(MaxNLocator(6))
        elif decades < 3:
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_ylim(0.8 * drawn.min(), 1.25 * drawn.max())


def penalty_scale(axes: Sequence[Axes]) -> None:
    """Make the shared scale of panels linear up to `LINEAR_UP_TO` nats and logarithmic beyond.

    States without a map then fit on it. Draw all lines first: the scale does not adapt to later ones.
    """
    least, most = -LINEAR_UP_TO / 8, LINEAR_UP_TO
    for axis in axes:
        axis.axhline(0, color="0.6", linewidth=0.8, zorder=0)
        axis.set_yscale("symlog", linthresh=LINEAR_UP_TO, linscale=0.6)
        axis.yaxis.set_major_formatter("{x:g}")
        least = min(least, float(axis.dataLim.y0))
        most = max(most, float(axis.dataLim.y1))
    axes[0].set_ylim(2 * least, 1.5 * most)  # little room below zero
