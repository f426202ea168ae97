"""Figures of a study as images, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import figure as mpl
from matplotlib.axes import Axes
from matplotlib.image import AxesImage

from aligners.reports.drawing import Look, dress, panels, short
from aligners.reports.study.contents import BoxPanel, Figure, HeatPanel, LinePanel
from aligners.reports.study.drawing.colours import Palette

__all__ = ["draw"]

ABREAST = 3
WRITTEN = 14  # rows up to which the values stand in the cells
MOST_TICKS = 26
LARGEST = 4.8  # inches of a map
LINE = 36  # letters that fit below a panel
LETTER = 0.075  # inches of a letter of a model's name, which stands beside its block


def draw(figure: Figure, palette: Palette) -> mpl.Figure:
    """Draw all panels.

    Args:
        figure: its panels are of one kind.
        palette: of the report.
    """
    heats = [panel for panel in figure.panels if isinstance(panel, HeatPanel)]
    if heats:
        return _heat_figure(figure, heats)
    size = max(3.2, 0.34 * max(len(panel.across) for panel in figure.panels) + 0.8)
    drawn, axes = panels(len(figure.panels), ABREAST, (size, 2.9), (1.9, 0.7), sharey="row")
    for axis, panel in zip(axes, figure.panels, strict=True):
        if isinstance(panel, BoxPanel):
            _boxes(axis, panel, palette)
        elif isinstance(panel, LinePanel):
            _lines(axis, panel, palette)
        axis.set_title(panel.title, fontsize=9)
    if figure.limits:
        for axis in axes:
            axis.set_ylim(*figure.limits)
    dress(drawn, axes, figure.across, figure.scale)
    return drawn


def _boxes(axis: Axes, panel: BoxPanel, palette: Palette) -> None:
    """Draw a box for each series at each place, side by side where a place has several."""
    beside = max(sum(bool(len(series.values[place])) for series in panel.series) for place in range(len(panel.across)))
    width = 0.75 / max(beside, 1)
    for order, series in enumerate(panel.series):
        aside = (order - (beside - 1) / 2) * width if beside > 1 else 0.0
        places = [place for place, values in enumerate(series.values) if len(values)]
        colour = palette.look(series.meaning).colour
        line = {"color": colour, "linewidth": 1.1}
        look: Look = {"widths": 0.85 * width, "patch_artist": True, "medianprops": {**line, "linewidth": 2}}
        box = {"facecolor": colour + "55", "edgecolor": colour}
        flier = {"marker": ".", "markersize": 3, "markeredgecolor": colour}
        if places:
            axis.boxplot([list(series.values[place]) for place in places], positions=[p + aside for p in places],
                         boxprops=box, whiskerprops=line, capprops=line, flierprops=flier, **look)  # fmt: skip
            label = None if series.name in panel.across else series.name  # which names it already
            axis.plot([], [], "s", markerfacecolor=colour + "55", markeredgecolor=colour, label=label)
    axis.set_xticks(range(len(panel.across)), panel.across, **_slant(panel.across))
    axis.set_xlim(-0.6, len(panel.across) - 0.4)


def _lines(axis: Axes, panel: LinePanel, palette: Palette) -> None:
    places = np.arange(len(panel.across))
    for series in panel.series:
        look = palette.look(series.meaning, series.number)
        middle = np.array([values[0] for values in series.values], dtype=float)
        axis.plot(places, middle, label=series.name, color=look.colour, marker=look.marker[0], linestyle=look.dash[0],
                  markersize=4, linewidth=1.4)  # fmt: skip
        if len(series.low):
            axis.fill_between(places, np.array(series.low, dtype=float), np.array(series.high, dtype=float),
                              color=look.colour, alpha=0.15, linewidth=0)  # fmt: skip
    axis.set_xticks(places, panel.across, **_slant(panel.across))


def _heat_figure(figure: Figure, heats: Sequence[HeatPanel]) -> mpl.Figure:
    low, high = figure.limits or _limits(heats)
    cells = max(max(panel.values.shape) for panel in heats)
    size = min(max(2.6, 0.30 * cells + 0.6), LARGEST)
    abreast = ABREAST if size < LARGEST else 2
    named = LETTER * max((len(name) for panel in heats for name, _ in panel.column_blocks), default=0)
    around = (size + 0.4 + named, size + 0.5 + named)
    drawn, axes = panels(len(heats), abreast, around, (1.2, 0.5), boxed=True, font=8)
    for axis, panel in zip(axes, heats, strict=True):
        image = _heat(axis, panel, low, high)
    bar = drawn.colorbar(image, ax=axes, shrink=0.6, pad=0.02, label=figure.scale)
    if low > high:
        bar.ax.invert_yaxis()
    return drawn


def _heat(axis: Axes, panel: HeatPanel, low: float, high: float) -> AxesImage:
    """Draw one map; with `low` above `high`, low values are the bright ones."""
    ends: Look = {"vmin": min(low, high), "vmax": max(low, high), "cmap": "viridis" if low < high else "viridis_r"}
    image = axis.imshow(panel.values, origin="lower", aspect="equal", **ends)
    if max(panel.values.shape) <= WRITTEN:
        for (i, j), value in np.ndenumerate(panel.values):
            if np.isfinite(value):
                light = (value - low) / (high - low) > 0.6
                axis.text(j, i, short(value), ha="center", va="center", fontsize=6,
                          color="k" if light else "w")  # fmt: skip
    for cut in panel.cuts:
        axis.axhline(cut - 0.5, color="#D55E00", linewidth=2)
        axis.axvline(cut - 0.5, color="#D55E00", linewidth=2)
    _name(axis, panel)
    axis.set_title(panel.title, fontsize=9)
    return image


def _name(axis: Axes, panel: HeatPanel) -> None:
    """Name rows and columns: models where there are blocks, else layers."""
    for blocks, names, ticks, part, label, say in (
        (panel.row_blocks, panel.rows, axis.set_yticks, axis.axhline, panel.up, axis.set_ylabel),
        (panel.column_blocks, panel.columns, axis.set_xticks, axis.axvline, panel.across, axis.set_xlabel),
    ):
        if blocks:
            ends = np.cumsum([size for _, size in blocks])
            for end in ends[:-1]:
                part(end - 0.5, color="w", linewidth=1.2)
            middles = ends - np.array([size for _, size in blocks]) / 2 - 0.5
            look = {"rotation": 0} if part == axis.axhline else {"rotation": 90, "va": "top"}
            ticks(middles, [name for name, _ in blocks], **look)
        else:
            step = -(-len(names) // MOST_TICKS)
            ticks(range(0, len(names), step), list(names)[::step])
            say(label)
    axis.tick_params(length=0)


def _limits(heats: Sequence[HeatPanel]) -> tuple[float, float]:
    values = np.concatenate([panel.values.ravel() for panel in heats])
    values = values[np.isfinite(values)]
    return (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)


def _slant(names: Sequence[str]) -> Look:
    """Names too long to stand side by side slant, and end at their place."""
    slanted: Look = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    long = max(map(len, names), default=0) > 4 and sum(map(len, names)) + 2 * len(names) > LINE
    return slanted if long else {}
