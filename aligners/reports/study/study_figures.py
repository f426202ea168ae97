"""Figures of a study, drawn from their values."""

import math
from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import figure as mpl
from matplotlib.axes import Axes
from numpy.typing import NDArray

from aligners.reports.drawing import COLOURS, Look, dress, heat_map, panels
from aligners.reports.study.contents import (
    BoxPanel,
    Figure,
    HeatPanel,
    Meaning,
    Series,
    SeriesPanel,
)

BLUE, VERMILION, *OTHERS = COLOURS  # Okabe and Ito's
STAGES = {"random": "#7F7F7F", "pretrained": BLUE, "finetuned": VERMILION, "None": BLUE}
MARKERS = ("o", "s", "D", "^", "X")
DASHES = ("-", "--", ":", "-.")
CUTS = VERMILION  # lines between clusters
MOST_TICKS = 26
ABREAST = 3
SMALL = 0.05  # the largest value of maps whose cells have multiples of a power of ten
WRITTEN = 14  # rows up to which the values stand in the cells
LARGEST = 4.8  # inches of a map
LINE = 36  # letters that fit below a panel
LETTER = 0.075  # inches of a letter of a title, or of a model's name, which stands beside its block


class Palette:
    """Gives each meaning its own look: stages always the same one, everything else in the order of the report.

    Where there are more meanings than colours, colours repeat, with another marker and dash.

    Args:
        figures: of the whole report.
    """

    def __init__(self, figures: Iterable[Figure]) -> None:
        self._looks: dict[Meaning, tuple[str, int, int]] = {}  # colour, marker, dash
        for place, (name, colour) in enumerate(STAGES.items()):
            self._looks["stage", name] = colour, place, 0
        meanings = []
        for figure in figures:
            for panel in series_panels(figure):
                meanings += [series.meaning for series in panel.series]
        others = [
            meaning for meaning in dict.fromkeys(meanings) if meaning not in self._looks
        ]
        for place, meaning in enumerate(others):
            again, number = divmod(place, len(OTHERS))
            self._looks[meaning] = OTHERS[number], place + again, again

    def look(self, meaning: Meaning, number: int = 0) -> Look:
        """Return how to draw what has this meaning: the first one plain, others with another marker and dash."""
        colour, marker, dash = self._looks[meaning]
        return {
            "color": colour,
            "marker": MARKERS[(marker + number) % len(MARKERS)],
            "linestyle": DASHES[(dash + number) % len(DASHES)],
        }


def series_panels(figure: Figure) -> list[SeriesPanel]:
    """Return the panels of a figure if they are boxes or lines; otherwise none."""
    return [panel for panel in figure.panels if isinstance(panel, SeriesPanel)]


def heat_panels(figure: Figure) -> list[HeatPanel]:
    """Return the panels of a figure if they are heat maps; otherwise none."""
    return [panel for panel in figure.panels if isinstance(panel, HeatPanel)]


def draw(figure: Figure, palette: Palette) -> mpl.Figure:
    """Draw all panels.

    Args:
        figure: its panels are of one kind.
        palette: of the report.
    """
    if heat_panels(figure):
        return _draw_heat_maps(figure)
    return _draw_series(figure, palette)


# ---------------------------------------------------------------------- boxes and lines


def _draw_series(figure: Figure, palette: Palette) -> mpl.Figure:
    shown = series_panels(figure)
    most = max(len(panel.across) for panel in shown)
    size = max(3.2, 0.34 * most + 0.8)
    drawn, axes = panels(len(shown), ABREAST, (size, 2.9), (1.9, 0.7), sharey="row")
    for axis, panel in zip(axes, shown, strict=True):
        if isinstance(panel, BoxPanel):
            _draw_boxes(axis, panel, palette)
        else:
            _draw_lines(axis, panel, palette)
        axis.set_title(panel.title, fontsize=9)
        axis.set_xticks(range(len(panel.across)), panel.across, **_slant(panel.across))
    dress(drawn, axes, figure.across, figure.scale)
    return drawn


def _draw_boxes(axis: Axes, panel: SeriesPanel, palette: Palette) -> None:
    """Draw a box for each series at each place, side by side where a place has several."""
    places = np.arange(len(panel.across))
    beside = _boxes_beside(panel)
    width = 0.75 / beside
    for order, series in enumerate(panel.series):
        colour = palette.look(series.meaning)["color"]
        aside = 0.0
        if beside > 1:
            aside = (order - (beside - 1) / 2) * width
        _draw_box(axis, series, places + aside, 0.85 * width, colour)
        label: str | None = series.name
        if label in panel.across:  # which names it already
            label = None
        square = {"markerfacecolor": f"{colour}55", "markeredgecolor": colour}
        axis.plot([], [], "s", label=label, **square)
    axis.set_xlim(-0.6, len(panel.across) - 0.4)


def _boxes_beside(panel: SeriesPanel) -> int:
    """Return the largest number of boxes at a place of a panel."""
    most = 1
    for place in range(len(panel.across)):
        filled = sum(len(series.values[place]) > 0 for series in panel.series)
        most = max(most, filled)
    return most


def _draw_box(
    axis: Axes, series: Series, places: NDArray[Any], width: float, colour: str
) -> None:
    line = {"color": colour, "linewidth": 1.1}
    axis.boxplot(
        series.values,
        positions=places,
        widths=width,
        patch_artist=True,
        boxprops={"facecolor": f"{colour}55", "edgecolor": colour},
        whiskerprops=line,
        capprops=line,
        medianprops={"color": colour, "linewidth": 2},
        flierprops={"marker": ".", "markersize": 3, "markeredgecolor": colour},
    )


def _draw_lines(axis: Axes, panel: SeriesPanel, palette: Palette) -> None:
    places = np.arange(len(panel.across))
    for series in panel.series:
        look = palette.look(series.meaning, series.number)
        axis.plot(
            places,
            series.values,
            label=series.name,
            markersize=4,
            linewidth=1.4,
            **look,
        )
        if len(series.low):
            band: Look = {"color": look["color"], "alpha": 0.15, "linewidth": 0}
            axis.fill_between(places, series.low, series.high, **band)


def _slant(names: Sequence[str]) -> Look:
    """Slant names too long to fit side by side, so that they end at their place."""
    letters = sum(map(len, names)) + 2 * len(names)
    longest = max(map(len, names), default=0)
    if longest > 4 and letters > LINE:
        return {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    return {}


# ---------------------------------------------------------------------- heat maps


def _draw_heat_maps(figure: Figure) -> mpl.Figure:
    shown = heat_panels(figure)
    values = np.concatenate([panel.values.ravel() for panel in shown])
    values = values[np.isfinite(values)]
    low, high = figure.limits or _ends(values)  # the first is dark
    unit = _unit(values)
    drawn, axes = _heat_axes(shown)
    for axis, panel in zip(axes, shown, strict=True):
        image = heat_map(
            axis, panel.values, (), (), low, high, written=WRITTEN, font=6, unit=unit
        )
        _name_layers(axis, panel)
        _draw_rules(axis, panel)
    scale = figure.scale
    if unit != 1:
        scale = f"{scale}; numbers in the cells: times {unit:g}"
    bar = drawn.colorbar(image, ax=axes, shrink=0.6, pad=0.02, label=scale)
    if low > high:
        bar.ax.invert_yaxis()
    return drawn


def _ends(values: NDArray[np.float64]) -> tuple[float, float]:
    if not len(values):
        return 0.0, 1.0
    return values.min(), values.max()


def _heat_axes(shown: Sequence[HeatPanel]) -> tuple[mpl.Figure, list[Axes]]:
    """Make room for maps with their titles and, beside their blocks, the names of these."""
    cells = max(max(panel.values.shape) for panel in shown)
    size = min(max(2.6, 0.30 * cells + 0.6), LARGEST)
    letters = int((size + 0.4) / LETTER)
    longest, lines = 0, 0
    titles = []
    for panel in shown:
        title = fill(panel.title, letters, break_long_words=False)
        titles.append(title)
        lines = max(lines, title.count("\n"))
        for name, _ in panel.blocks:
            longest = max(longest, len(name))
    named = LETTER * longest
    around = (size + 0.4 + named, size + 0.5 + named + 0.15 * lines)
    abreast = 2
    if size < LARGEST:
        abreast = ABREAST
    drawn, axes = panels(len(shown), abreast, around, (1.2, 0.5), boxed=True, font=8)
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=9)
    return drawn, axes


def _name_layers(axis: Axes, panel: HeatPanel) -> None:
    """Name both axes and their ticks: blocks in their middles or, if there are none, rows and columns."""
    axis.set(xlabel=panel.across, ylabel=panel.up)
    if not panel.blocks:
        axis.set_yticks(*_ticks(panel.rows))
        axis.set_xticks(*_ticks(panel.columns))
        return
    names = [name for name, _ in panel.blocks]
    sizes = np.array([size for _, size in panel.blocks])
    middles = np.cumsum(sizes) - sizes / 2 - 0.5
    axis.set_yticks(middles, names)
    axis.set_xticks(middles, names, rotation=90, va="top")


def _ticks(names: Sequence[str]) -> tuple[Sequence[int], Sequence[str]]:
    """Return places and names along an axis, as many as there is room for."""
    every = math.ceil(len(names) / MOST_TICKS)
    return range(0, len(names), every), names[::every]


def _draw_rules(axis: Axes, panel: HeatPanel) -> None:
    """Draw lines across and up a map: between blocks, and where clusters end."""
    sizes = [size for _, size in panel.blocks[:-1]]
    ends = np.cumsum(sizes, dtype=int)
    for places, colour, width in ((ends, "white", 1.2), (panel.cuts, CUTS, 2)):
        for place in places:
            axis.axhline(place - 0.5, color=colour, linewidth=width)
            axis.axvline(place - 0.5, color=colour, linewidth=width)


def _unit(values: NDArray[np.float64]) -> float:
    """Return the unit of numbers in cells: 1, or a power of ten if two decimals would show little of any value."""
    most = float(np.abs(values).max(initial=0))
    if not 0 < most < SMALL:
        return 1.0
    return 10.0 ** math.floor(math.log10(most))
