"""Figures of a study drawn from their values: as images by matplotlib, and with values under the pointer by plotly."""

import math
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import count
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
from matplotlib import figure as mpl
from matplotlib.axes import Axes
from numpy.typing import NDArray

from aligners.reports.drawing import COLOURS, Look, dress, heat_map, panels
from aligners.reports.study.contents import BoxPanel, Figure, HeatPanel, LinePanel, Meaning, Panel, SeriesPanel

BLUE, VERMILION, *OTHERS = COLOURS  # Okabe and Ito's
STAGES = {"random": "#7F7F7F", "pretrained": BLUE, "finetuned": VERMILION, "None": BLUE}
MARKERS = (("o", "circle"), ("s", "square"), ("D", "diamond"), ("^", "triangle-up"), ("X", "x"))
DASHES = (("-", "solid"), ("--", "dash"), (":", "dot"), ("-.", "dashdot"))
CUTS = VERMILION  # lines between clusters
MOST_TICKS = 26
ABREAST = 3
SMALL = 0.05  # the largest value of maps whose cells have multiples of a power of ten
WRITTEN = 14  # rows up to which the values stand in the cells
LARGEST = 4.8  # inches of a map
LINE = 36  # letters that fit below a panel
LETTER = 0.075  # inches of a letter of a title, or of a model's name, which stands beside its block
PLOTLY = find_spec("plotly") is not None  # the extra `report`
LEAST = 260  # pixels of a panel
PANEL_HEIGHTS = {3: 340, 2: 460, 1: 760}  # pixels, by the number of panels side by side
PAGE_WRITTEN = 8  # rows up to which the values stand in the cells
MOST_POINTS = 60  # of a box up to which each is drawn
PAGE_LETTER = 0.0066  # of the figure's width, a letter of a model's name
FONT = {"family": "system-ui, sans-serif", "size": 12, "color": "#1a1a1a"}
Place = dict[str, int]  # row and column of a panel


class SeriesLook(NamedTuple):
    """How a series is drawn.

    Attributes:
        colour: as `#RRGGBB`.
        marker: as matplotlib and as plotly name it.
        dash: likewise.
    """

    colour: str
    marker: tuple[str, str]
    dash: tuple[str, str]


class Palette:
    """Gives each meaning a look of its own: stages always the same, everything else in the order of the report.

    Where there are more meanings than colours, colours come again with another marker and dash.

    Args:
        figures: of the whole report.
    """

    def __init__(self, figures: Iterable[Figure]) -> None:
        panels = [panel for figure in figures for panel in figure.panels if isinstance(panel, SeriesPanel)]
        self._looks: dict[Meaning, SeriesLook] = {}
        others = count()
        for kind, name in dict.fromkeys(series.meaning for panel in panels for series in panel.series):
            if kind == "stage":
                look = SeriesLook(STAGES[name], MARKERS[list(STAGES).index(name)], DASHES[0])
            else:
                again, colour = divmod(place := next(others), len(OTHERS))
                look = SeriesLook(OTHERS[colour], MARKERS[(place + again) % len(MARKERS)], DASHES[again % len(DASHES)])
            self._looks[kind, name] = look

    def look(self, meaning: Meaning, number: int = 0) -> SeriesLook:
        """How to draw what has this meaning: of several, the first as it is, others with another marker and dash."""
        look = self._looks[meaning]
        if number == 0:
            return look
        marker, dash = MARKERS.index(look.marker) + number, DASHES.index(look.dash) + number
        return look._replace(marker=MARKERS[marker % len(MARKERS)], dash=DASHES[dash % len(DASHES)])


class Ticks(NamedTuple):
    """What stands along an axis of a map.

    Attributes:
        places: of the names.
        names: of models in the middle of their blocks, or of layers, as many as there is room for.
        title: of the axis, unless it names models.
        ends: numbers of the rows or columns before which a block ends.
    """

    places: Sequence[float]
    names: Sequence[str]
    title: str | None = None
    ends: Sequence[int] = ()


def ticks(blocks: Sequence[tuple[str, int]], names: Sequence[str], title: str) -> Ticks:
    """Name the blocks of an axis, or its rows or columns where there are none."""
    if blocks:
        sizes = np.array([size for _, size in blocks])
        ends = np.cumsum(sizes)
        return Ticks((ends - sizes / 2 - 0.5).tolist(), [name for name, _ in blocks], ends=ends[:-1].tolist())
    shown = range(0, len(names), -(-len(names) // MOST_TICKS))
    return Ticks(shown, [names[place] for place in shown], title)


def heats(figure: Figure) -> list[HeatPanel]:
    """The panels of a figure if they are maps, else none."""
    return [panel for panel in figure.panels if isinstance(panel, HeatPanel)]


def boxes_beside(panel: Panel) -> int:
    """The most boxes that a place of a panel has."""
    if not isinstance(panel, BoxPanel):
        return 0
    places = zip(*(series.values for series in panel.series), strict=True)
    return max((sum(len(values) > 0 for values in boxes) for boxes in places), default=0)


def draw(figure: Figure, palette: Palette) -> mpl.Figure:
    """Draw all panels.

    Args:
        figure: its panels are of one kind.
        palette: of the report.
    """
    if heats(figure):
        return _heat_figure(figure)
    size = max(3.2, 0.34 * max(len(panel.across) for panel in figure.panels) + 0.8)
    drawn, axes = panels(len(figure.panels), ABREAST, (size, 2.9), (1.9, 0.7), sharey="row")
    for axis, panel in zip(axes, figure.panels, strict=True):
        if isinstance(panel, BoxPanel):
            _boxes(axis, panel, palette)
        elif isinstance(panel, LinePanel):
            _lines(axis, panel, palette)
        axis.set_title(panel.title, fontsize=9)
        axis.set_xticks(range(len(panel.across)), panel.across, **_slant(panel.across))
        if figure.limits:
            axis.set_ylim(*figure.limits)
    dress(drawn, axes, figure.across, figure.scale)
    return drawn


def _boxes(axis: Axes, panel: BoxPanel, palette: Palette) -> None:
    """Draw a box for each series at each place, side by side where a place has several."""
    beside = max(1, boxes_beside(panel))
    width = 0.75 / beside
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
    axis.set_xlim(-0.6, len(panel.across) - 0.4)


def _lines(axis: Axes, panel: LinePanel, palette: Palette) -> None:
    places = np.arange(len(panel.across))
    for series in panel.series:
        look = palette.look(series.meaning, series.number)
        middle = np.array([values[0] for values in series.values], dtype=float)
        axis.plot(places, middle, label=series.name, color=look.colour, marker=look.marker[0], linestyle=look.dash[0],
                  markersize=4, linewidth=1.4)  # fmt: skip
        if len(series.low):
            low, high = (np.array(ends, dtype=float) for ends in (series.low, series.high))
            axis.fill_between(places, low, high, color=look.colour, alpha=0.15, linewidth=0)


def _heat_figure(figure: Figure) -> mpl.Figure:
    shown = heats(figure)
    values = np.concatenate([panel.values[np.isfinite(panel.values)] for panel in shown])
    low, high = figure.limits or ((values.min(), values.max()) if len(values) else (0.0, 1.0))  # the first is dark
    unit = _unit(values)
    size = min(max(2.6, 0.30 * max(max(panel.values.shape) for panel in shown) + 0.6), LARGEST)
    named = LETTER * max((len(name) for panel in shown for name, _ in panel.column_blocks), default=0)
    titles = [fill(panel.title, int((size + 0.4) / LETTER), break_long_words=False) for panel in shown]
    further = 0.15 * max(title.count("\n") for title in titles)
    around = (size + 0.4 + named, size + 0.5 + named + further)
    drawn, axes = panels(len(shown), ABREAST if size < LARGEST else 2, around, (1.2, 0.5), boxed=True, font=8)
    for axis, panel, title in zip(axes, shown, titles, strict=True):
        image = heat_map(axis, panel.values, (), (), low, high, written=WRITTEN, font=6, unit=unit)
        for cut in panel.cuts:
            axis.axhline(cut - 0.5, color=CUTS, linewidth=2)
            axis.axvline(cut - 0.5, color=CUTS, linewidth=2)
        _name(axis, panel)
        axis.set_title(title, fontsize=9)
    scale = figure.scale if unit == 1 else f"{figure.scale}; numbers in the cells: times {unit:g}"
    bar = drawn.colorbar(image, ax=axes, shrink=0.6, pad=0.02, label=scale)
    if low > high:
        bar.ax.invert_yaxis()
    return drawn


def _unit(values: NDArray[np.float64]) -> float:
    """Of which numbers in cells are multiples: 1, or a power of ten if two decimals would show little of any value."""
    most = float(np.abs(values).max(initial=0))
    return 10.0 ** math.floor(math.log10(most)) if 0 < most < SMALL else 1.0


def _name(axis: Axes, panel: HeatPanel) -> None:
    """Name rows and columns: models where there are blocks, with lines between them, else layers."""
    up, across = ticks(panel.row_blocks, panel.rows, panel.up), ticks(panel.column_blocks, panel.columns, panel.across)
    for end in up.ends:
        axis.axhline(end - 0.5, color="w", linewidth=1.2)
    for end in across.ends:
        axis.axvline(end - 0.5, color="w", linewidth=1.2)
    axis.set_yticks(up.places, up.names)
    look: Look = {"rotation": 90, "va": "top"} if panel.column_blocks else {}
    axis.set_xticks(across.places, across.names, **look)
    axis.set(xlabel=across.title or "", ylabel=up.title or "")


def _slant(names: Sequence[str]) -> Look:
    """Names too long to stand side by side slant, and end at their place."""
    slanted: Look = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    long = max(map(len, names), default=0) > 4 and sum(map(len, names)) + 2 * len(names) > LINE
    return slanted if long else {}


def script() -> str:
    """Plotly's own JavaScript, once for all figures of a page."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def fragment(figure: Figure, palette: Palette) -> tuple[str, int]:
    """Return a figure as a piece of HTML that `script` draws, and the least width in pixels at which it can be read."""
    from plotly.io import to_html
    from plotly.subplots import make_subplots

    maps, panels = heats(figure), figure.panels
    most = _page_abreast(figure)
    abreast = min(most, len(panels))
    down = -(-len(panels) // abreast)
    height = max(PANEL_HEIGHTS[most], 460) if len(maps) == 1 else PANEL_HEIGHTS[most]
    letters = max((len(name) for panel in maps for name, _ in panel.row_blocks), default=0)  # beside their blocks
    drawn = make_subplots(
        down, abreast, subplot_titles=[panel.title for panel in panels],
        vertical_spacing=min(0.9 / max(down, 1), 100 / (height * down)),
        horizontal_spacing=max(0.09, 0.02 + PAGE_LETTER * letters), shared_yaxes=False if maps else "rows",
    )  # fmt: skip
    for number, panel in enumerate(panels):
        place = {"row": number // abreast + 1, "col": number % abreast + 1}
        if isinstance(panel, HeatPanel):
            _page_heat(drawn, panel, number, place)
        elif isinstance(panel, BoxPanel):
            _page_boxes(drawn, panel, palette, place)
        elif isinstance(panel, LinePanel):
            _page_lines(drawn, panel, palette, place)
    _page_dress(drawn, figure, height * down + 120)
    config = {"responsive": True, "displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d"]}
    text = to_html(drawn, include_plotlyjs=False, full_html=False, config=config, default_width="100%",
                   div_id=f"plot-{figure.name}")  # fmt: skip
    return str(text), LEAST * abreast + 120


def _page_heat(drawn: Any, panel: HeatPanel, number: int, place: Place) -> None:
    """Add a map; a trace's own axes are numbered like the panels."""
    import plotly.graph_objects as go

    count_y, count_x = panel.values.shape
    digits = ".2f" if _unit(panel.values[np.isfinite(panel.values)]) == 1 else ".2g"
    written = f"%{{z:{digits}}}" if max(count_x, count_y) <= PAGE_WRITTEN else None
    names = np.array([[f"{row} → {column}" for column in panel.columns] for row in panel.rows])
    drawn.add_trace(
        go.Heatmap(z=panel.values.astype(np.float32), x=np.arange(count_x), y=np.arange(count_y), text=names,
                   texttemplate=written, textfont={"size": 10}, hovertemplate="%{text}: %{z:.3g}<extra></extra>",
                   coloraxis="coloraxis", hoverongaps=False),
        **place,
    )  # fmt: skip
    axis = "" if number == 0 else str(number + 1)
    up, across = ticks(panel.row_blocks, panel.rows, panel.up), ticks(panel.column_blocks, panel.columns, panel.across)
    square = {"scaleanchor": f"x{axis}", "constrain": "domain", "constraintoward": "top"}
    drawn.update_yaxes(**_page_ticks(up), **square, showgrid=False, zeroline=False, **place)
    drawn.update_xaxes(**_page_ticks(across), constrain="domain", showgrid=False, zeroline=False, **place)
    shapes = [*_rules("y", axis, up.ends, "white", 1.5), *_rules("x", axis, across.ends, "white", 1.5)]
    shapes += [rule for way in "xy" for rule in _rules(way, axis, panel.cuts, CUTS, 3)]
    drawn.layout.shapes = (*drawn.layout.shapes, *shapes)


def _page_ticks(shown: Ticks) -> dict[str, Any]:
    titled = {} if shown.title is None else {"title_text": shown.title, "title_standoff": 4}
    return {"tickvals": list(shown.places), "ticktext": list(shown.names), **titled}


def _rules(way: str, axis: str, places: Iterable[int], colour: str, width: float) -> list[dict[str, Any]]:
    """Lines before rows (y) or columns (x), as shapes: plotly's own way to add them takes a second for a hundred."""
    other = "x" if way == "y" else "y"
    refs = {f"{way}ref": f"{way}{axis}", f"{other}ref": f"{other}{axis} domain"}
    look = {"type": "line", "line": {"color": colour, "width": width}}
    return [{**look, **refs, f"{way}0": place - 0.5, f"{way}1": place - 0.5, f"{other}0": 0, f"{other}1": 1}
            for place in places]  # fmt: skip


def _page_boxes(drawn: Any, panel: BoxPanel, palette: Palette, place: Place) -> None:
    import plotly.graph_objects as go

    for series in panel.series:
        look = palette.look(series.meaning)
        across = [name for name, values in zip(panel.across, series.values, strict=True) for _ in values]
        every = "all" if max(map(len, series.values)) <= MOST_POINTS else "outliers"
        drawn.add_trace(
            go.Box(x=across, y=[value for box in series.values for value in box],
                   text=[point for box in series.points for point in box] or None, boxpoints=every, jitter=0.4,
                   pointpos=0, offsetgroup=series.name, hoveron="points+boxes", line={"width": 1.3},
                   marker={"color": look.colour, "size": 3.5, "symbol": look.marker[1]},
                   hovertemplate="%{text}<br>%{x}: %{y:.4g}<extra>" + series.name + "</extra>",
                   name=series.name, legendgroup=series.name),
            **place,
        )  # fmt: skip
    drawn.update_xaxes(type="category", categoryorder="array", categoryarray=list(panel.across), **place)


def _page_lines(drawn: Any, panel: LinePanel, palette: Palette, place: Place) -> None:
    """Add lines, beside each other at each place, so that their intervals can be told apart."""
    import plotly.graph_objects as go

    step = min(0.06, 0.4 / len(panel.series))
    for order, series in enumerate(panel.series):
        look = palette.look(series.meaning, series.number)
        middle, low, high = (
            np.array(values, dtype=float) for values in ([one[0] for one in series.values], series.low, series.high)
        )
        bars = {"type": "data", "symmetric": False, "thickness": 1, "width": 3}
        bars |= {"array": high - middle, "arrayminus": middle - low} if len(low) else {}
        across = np.arange(len(panel.across)) + step * (order - (len(panel.series) - 1) / 2)
        drawn.add_trace(
            go.Scatter(x=across, y=middle, error_y=bars if len(low) else None, mode="lines+markers",
                       text=list(panel.across), line={"color": look.colour, "dash": look.dash[1], "width": 1.8},
                       marker={"symbol": look.marker[1], "size": 7},
                       hovertemplate="%{text}: %{y:.4g}<extra>" + series.name + "</extra>",
                       name=series.name, legendgroup=series.name),
            **place,
        )  # fmt: skip
    shown = _page_ticks(ticks((), panel.across, ""))
    drawn.update_xaxes(**shown, zeroline=False, range=[-0.5, len(panel.across) - 0.5], **place)


def _page_dress(drawn: Any, figure: Figure, height: float) -> None:
    """Give the whole figure its size, scale and legend; boxes stand beside each other where a place has several."""
    legend = {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"}
    mode = "group" if max(map(boxes_beside, figure.panels)) > 1 else "overlay"
    drawn.update_layout(template="plotly_white", height=height, font=FONT, boxmode=mode, legend=legend,
                        margin={"l": 64, "r": 16, "t": 48, "b": 64}, hoverlabel={"font": {"size": 13}})  # fmt: skip
    drawn.update_annotations(font_size=12)
    if heats(figure):
        low, high = figure.limits or (None, None)
        turned = low is not None and high is not None and low > high
        ends = {"cmin": high, "cmax": low} if turned else {"cmin": low, "cmax": high}
        bar = {"title": {"text": figure.scale, "side": "right"}, "len": 0.8}
        drawn.update_layout(coloraxis={"colorscale": "Viridis", "reversescale": turned, **ends, "colorbar": bar})
        return
    named = {name for panel in figure.panels if isinstance(panel, BoxPanel) for name in panel.across}
    for trace in drawn.data:  # named once: its entry in the legend switches it in all panels
        trace.showlegend = trace.name not in named
        named.add(trace.name)
    drawn.update_yaxes(title_text=figure.scale, col=1)
    drawn.update_yaxes(exponentformat="power")  # not µ for millionths
    drawn.update_xaxes(title_text=figure.across, title_standoff=4)
    if figure.limits:
        drawn.update_yaxes(range=list(figure.limits))


def _page_abreast(figure: Figure) -> int:
    """How many panels side by side: fewer where they hold much."""
    if maps := heats(figure):
        cells = max(max(panel.values.shape) for panel in maps)
        return 3 if cells <= 26 else 2 if cells <= 60 else 1
    return 3 if max(len(panel.across) for panel in figure.panels) <= 14 else 2
