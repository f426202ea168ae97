"""Figures of a study drawn from their values: as images by matplotlib, and with values under the pointer by plotly."""

import math
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from matplotlib import figure as mpl
from matplotlib.axes import Axes
from numpy.typing import NDArray

from aligners.reports.drawing import COLOURS, Look, dress, heat_map, panels
from aligners.reports.study.contents import BoxPanel, Figure, HeatPanel, Meaning, SeriesPanel

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

    Where there are more meanings than colours, colours repeat, with another marker and dash.

    Args:
        figures: of the whole report.
    """

    def __init__(self, figures: Iterable[Figure]) -> None:
        looks = {
            ("stage", name): (colour, place, 0)
            for place, (name, colour) in enumerate(STAGES.items())
        }
        panels = (panel for figure in figures for panel in charts(figure))
        meanings = dict.fromkeys(series.meaning for panel in panels for series in panel.series)
        for place, meaning in enumerate(meaning for meaning in meanings if meaning[0] != "stage"):
            again, colour = divmod(place, len(OTHERS))
            looks[meaning] = OTHERS[colour], place + again, again
        self._looks = looks

    def look(self, meaning: Meaning, number: int = 0) -> SeriesLook:
        """How to draw what has this meaning: of several, the first as it is, others with another marker and dash."""
        colour, marker, dash = self._looks[meaning]
        return SeriesLook(
            colour, MARKERS[(marker + number) % len(MARKERS)], DASHES[(dash + number) % len(DASHES)]
        )


def ticks(
    names: Sequence[str], blocks: Sequence[tuple[str, int]] = ()
) -> tuple[list[float], list[str]]:
    """Places and names along an axis: of blocks in their middles or, without any, of rows, as many as have room."""
    if blocks:
        sizes = np.array([size for _, size in blocks])
        return (np.cumsum(sizes) - sizes / 2 - 0.5).tolist(), [name for name, _ in blocks]
    shown = range(0, len(names), -(-len(names) // MOST_TICKS))
    return [*shown], [names[place] for place in shown]


def rules(panel: HeatPanel) -> list[tuple[float, str, float, float]]:
    """Lines across and up a map: at which place, in which colour, how wide in an image and on a page."""
    ends = np.cumsum([size for _, size in panel.blocks], dtype=int)[:-1].tolist()
    return [
        *((end - 0.5, "white", 1.2, 1.5) for end in ends),
        *((cut - 0.5, CUTS, 2, 3) for cut in panel.cuts),
    ]


def heats(figure: Figure) -> list[HeatPanel]:
    """The panels of a figure if they are maps, else none."""
    return [panel for panel in figure.panels if isinstance(panel, HeatPanel)]


def charts(figure: Figure) -> list[SeriesPanel]:
    """The panels of a figure if they are boxes or lines, else none."""
    return [panel for panel in figure.panels if isinstance(panel, SeriesPanel)]


def boxes_beside(panel: SeriesPanel) -> int:
    """The most boxes that a place of a panel has."""
    places = zip(*(series.values for series in panel.series), strict=True)
    return max((sum(len(values) > 0 for values in boxes) for boxes in places), default=1)


def draw(figure: Figure, palette: Palette) -> mpl.Figure:
    """Draw all panels.

    Args:
        figure: its panels are of one kind.
        palette: of the report.
    """
    if heats(figure):
        return _heat_figure(figure)
    shown = charts(figure)
    size = max(3.2, 0.34 * max(len(panel.across) for panel in shown) + 0.8)
    drawn, axes = panels(len(shown), ABREAST, (size, 2.9), (1.9, 0.7), sharey="row")
    for axis, panel in zip(axes, shown, strict=True):
        (_boxes if isinstance(panel, BoxPanel) else _lines)(axis, panel, palette)
        axis.set_title(panel.title, fontsize=9)
        axis.set_xticks(range(len(panel.across)), panel.across, **_slant(panel.across))
    dress(drawn, axes, figure.across, figure.scale)
    return drawn


def _boxes(axis: Axes, panel: SeriesPanel, palette: Palette) -> None:
    """Draw a box for each series at each place, side by side where a place has several."""
    beside = boxes_beside(panel)
    width = 0.75 / beside
    for order, series in enumerate(panel.series):
        aside = (order - (beside - 1) / 2) * width * (beside > 1)
        colour = palette.look(series.meaning).colour
        line = {"color": colour, "linewidth": 1.1}
        look: Look = {
            "widths": 0.85 * width,
            "patch_artist": True,
            "medianprops": {**line, "linewidth": 2},
        }
        box = {"facecolor": colour + "55", "edgecolor": colour}
        flier = {"marker": ".", "markersize": 3, "markeredgecolor": colour}
        axis.boxplot(series.values, positions=np.arange(len(panel.across)) + aside, boxprops=box, whiskerprops=line,
                     capprops=line, flierprops=flier, **look)  # fmt: skip
        label = None if series.name in panel.across else series.name  # which names it already
        axis.plot([], [], "s", markerfacecolor=colour + "55", markeredgecolor=colour, label=label)
    axis.set_xlim(-0.6, len(panel.across) - 0.4)


def _lines(axis: Axes, panel: SeriesPanel, palette: Palette) -> None:
    places = np.arange(len(panel.across))
    for series in panel.series:
        look = palette.look(series.meaning, series.number)
        axis.plot(places, series.values, label=series.name, color=look.colour, marker=look.marker[0], markersize=4,
                  linestyle=look.dash[0], linewidth=1.4)  # fmt: skip
        if len(series.low):
            axis.fill_between(
                places, series.low, series.high, color=look.colour, alpha=0.15, linewidth=0
            )


def _heat_figure(figure: Figure) -> mpl.Figure:
    shown = heats(figure)
    values = np.concatenate([panel.values[np.isfinite(panel.values)] for panel in shown])
    low, high = figure.limits or (
        (values.min(), values.max()) if len(values) else (0.0, 1.0)
    )  # the first is dark
    unit = _unit(values)
    size = min(max(2.6, 0.30 * max(max(panel.values.shape) for panel in shown) + 0.6), LARGEST)
    named = LETTER * max((len(name) for panel in shown for name, _ in panel.blocks), default=0)
    titles = [
        fill(panel.title, int((size + 0.4) / LETTER), break_long_words=False) for panel in shown
    ]
    further = 0.15 * max(title.count("\n") for title in titles)
    around = (size + 0.4 + named, size + 0.5 + named + further)
    drawn, axes = panels(
        len(shown), ABREAST if size < LARGEST else 2, around, (1.2, 0.5), boxed=True, font=8
    )
    for axis, panel, title in zip(axes, shown, titles, strict=True):
        image = heat_map(axis, panel.values, (), (), low, high, written=WRITTEN, font=6, unit=unit)
        for place, colour, width, _ in rules(panel):
            axis.axhline(place, color=colour, linewidth=width)
            axis.axvline(place, color=colour, linewidth=width)
        axis.set_yticks(*ticks(panel.rows, panel.blocks))
        look: Look = {"rotation": 90, "va": "top"} if panel.blocks else {}
        axis.set_xticks(*ticks(panel.columns, panel.blocks), **look)
        axis.set(xlabel=panel.across, ylabel=panel.up)
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


def _slant(names: Sequence[str]) -> Look:
    """Names too long to stand side by side slant, and end at their place."""
    slanted: Look = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    long = max(map(len, names), default=0) > 4 and sum(map(len, names)) + 2 * len(names) > LINE
    return slanted if long else {}


def script() -> Markup:
    """Plotly's own JavaScript, once for all figures of a page."""
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs())


def fragment(figure: Figure, palette: Palette) -> dict[str, Any]:
    """A figure as a `fragment` of HTML that `script` draws, and the least `width` in pixels at which it can be read."""
    from plotly.io import to_html
    from plotly.subplots import make_subplots

    maps, panels = heats(figure), figure.panels
    most = _page_abreast(figure)
    abreast = min(most, len(panels))
    down = -(-len(panels) // abreast)
    height = max(PANEL_HEIGHTS[most], 460) if len(maps) == 1 else PANEL_HEIGHTS[most]
    letters = max(
        (len(name) for panel in maps for name, _ in panel.blocks), default=0
    )  # beside their blocks
    drawn = make_subplots(
        down, abreast, subplot_titles=[panel.title for panel in panels],
        vertical_spacing=min(0.9 / max(down, 1), 100 / (height * down)),
        horizontal_spacing=max(0.09, 0.02 + PAGE_LETTER * letters), shared_yaxes=False if maps else "rows",
    )  # fmt: skip
    for number, panel in enumerate(panels):
        place = {"row": number // abreast + 1, "col": number % abreast + 1}
        if isinstance(panel, HeatPanel):
            _page_heat(drawn, panel, number, place)
        else:
            (_page_boxes if isinstance(panel, BoxPanel) else _page_lines)(
                drawn, panel, palette, place
            )
    _page_dress(drawn, figure, height * down + 120)
    config = {
        "responsive": True,
        "displaylogo": False,
        "modeBarButtonsToRemove": ["select2d", "lasso2d"],
    }
    text = to_html(drawn, include_plotlyjs=False, full_html=False, config=config, default_width="100%",
                   div_id=f"plot-{figure.name}")  # fmt: skip
    return {"fragment": Markup(text), "width": LEAST * abreast + 120}


def _page_heat(drawn: Any, panel: HeatPanel, number: int, place: Place) -> None:
    """Add a map; a trace's own axes are numbered like the panels."""
    count_y, count_x = panel.values.shape
    digits = ".2f" if _unit(panel.values[np.isfinite(panel.values)]) == 1 else ".2g"
    written = f"%{{z:{digits}}}" if max(count_x, count_y) <= PAGE_WRITTEN else None
    names = np.array([[f"{row} → {column}" for column in panel.columns] for row in panel.rows])
    drawn.add_heatmap(
        z=panel.values.astype(np.float32), x=np.arange(count_x), y=np.arange(count_y), text=names, texttemplate=written,
        textfont={"size": 10}, hovertemplate="%{text}: %{z:.3g}<extra></extra>", coloraxis="coloraxis",
        hoverongaps=False, **place,
    )  # fmt: skip
    axis = "" if number == 0 else str(number + 1)
    square = {"scaleanchor": f"x{axis}", "constraintoward": "top"}
    look = {
        "constrain": "domain",
        "showgrid": False,
        "zeroline": False,
        "title_standoff": 4,
        **place,
    }
    drawn.update_yaxes(
        **_page_ticks(panel.rows, panel.blocks), title_text=panel.up, **square, **look
    )
    drawn.update_xaxes(**_page_ticks(panel.columns, panel.blocks), title_text=panel.across, **look)
    shapes = [  # plotly's own way to add lines takes a second for a hundred
        {"type": "line", "line": {"color": colour, "width": width}, f"{way}ref": f"{way}{axis}", f"{way}0": at,
         f"{way}1": at, f"{other}ref": f"{other}{axis} domain", f"{other}0": 0, f"{other}1": 1}
        for way, other in ("yx", "xy") for at, colour, _, width in rules(panel)
    ]  # fmt: skip
    drawn.layout.shapes = (*drawn.layout.shapes, *shapes)


def _page_ticks(names: Sequence[str], blocks: Sequence[tuple[str, int]] = ()) -> dict[str, Any]:
    return dict(zip(("tickvals", "ticktext"), ticks(names, blocks), strict=True))


def _page_boxes(drawn: Any, panel: SeriesPanel, palette: Palette, place: Place) -> None:
    for series in panel.series:
        look = palette.look(series.meaning)
        across = [
            name for name, values in zip(panel.across, series.values, strict=True) for _ in values
        ]
        every = "all" if max(map(len, series.values)) <= MOST_POINTS else "outliers"
        drawn.add_box(
            x=across, y=[value for box in series.values for value in box],
            text=[point for box in series.points for point in box] or None, boxpoints=every, jitter=0.4, pointpos=0,
            offsetgroup=series.name, hoveron="points+boxes", line={"width": 1.3},
            marker={"color": look.colour, "size": 3.5, "symbol": look.marker[1]},
            hovertemplate="%{text}<br>%{x}: %{y:.4g}<extra>" + series.name + "</extra>",
            name=series.name, legendgroup=series.name, **place,
        )  # fmt: skip
    drawn.update_xaxes(
        type="category", categoryorder="array", categoryarray=list(panel.across), **place
    )


def _page_lines(drawn: Any, panel: SeriesPanel, palette: Palette, place: Place) -> None:
    """Add lines, beside each other at each place, so that their intervals can be told apart."""
    step = min(0.06, 0.4 / len(panel.series))
    for order, series in enumerate(panel.series):
        look, middle = (
            palette.look(series.meaning, series.number),
            np.array(series.values, dtype=float)[:, 0],
        )
        bars: Look = {"type": "data", "symmetric": False, "thickness": 1, "width": 3}
        if len(series.low):
            bars |= {
                "array": np.subtract(series.high, middle),
                "arrayminus": np.subtract(middle, series.low),
            }
        drawn.add_scatter(
            x=np.arange(len(panel.across)) + step * (order - (len(panel.series) - 1) / 2), y=middle,
            error_y=bars if len(series.low) else None, mode="lines+markers", text=list(panel.across),
            line={"color": look.colour, "dash": look.dash[1], "width": 1.8},
            marker={"symbol": look.marker[1], "size": 7},
            hovertemplate="%{text}: %{y:.4g}<extra>" + series.name + "</extra>",
            name=series.name, legendgroup=series.name, **place,
        )  # fmt: skip
    drawn.update_xaxes(
        **_page_ticks(panel.across),
        title_standoff=4,
        zeroline=False,
        range=[-0.5, len(panel.across) - 0.5],
        **place,
    )


def _page_dress(drawn: Any, figure: Figure, height: float) -> None:
    """Give the whole figure its size, scale and legend; boxes stand beside each other where a place has several."""
    legend = {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"}
    boxes = [panel for panel in figure.panels if isinstance(panel, BoxPanel)]
    mode = "group" if max(map(boxes_beside, boxes), default=1) > 1 else "overlay"
    drawn.update_layout(template="plotly_white", height=height, font=FONT, boxmode=mode, legend=legend,
                        margin={"l": 64, "r": 16, "t": 48, "b": 64}, hoverlabel={"font": {"size": 13}})  # fmt: skip
    drawn.update_annotations(font_size=12)
    if heats(figure):
        limits, bar = (
            figure.limits or (),
            {"title": {"text": figure.scale, "side": "right"}, "len": 0.8},
        )
        ends = dict(zip(("cmin", "cmax"), sorted(limits), strict=False)) | {
            "reversescale": [*limits] != sorted(limits)
        }
        drawn.update_layout(coloraxis={"colorscale": "Viridis", **ends, "colorbar": bar})
        return
    named = {name for panel in boxes for name in panel.across}
    for trace in drawn.data:  # named once: its entry in the legend switches it in all panels
        trace.showlegend = trace.name not in named
        named.add(trace.name)
    drawn.update_yaxes(title_text=figure.scale, col=1)
    drawn.update_yaxes(exponentformat="power")  # not µ for millionths
    drawn.update_xaxes(title_text=figure.across, title_standoff=4)


def _page_abreast(figure: Figure) -> int:
    """How many panels side by side: fewer where they hold much."""
    if maps := heats(figure):
        cells = max(max(panel.values.shape) for panel in maps)
        return 3 if cells <= 26 else 2 if cells <= 60 else 1
    return 3 if max(len(panel.across) for panel in charts(figure)) <= 14 else 2
