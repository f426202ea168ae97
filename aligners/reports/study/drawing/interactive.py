"""Figures of a study with values under the pointer, by plotly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aligners.reports.study.contents import BoxPanel, Figure, HeatPanel, LinePanel, Series
from aligners.reports.study.drawing.colours import Palette

__all__ = ["PLOTLY", "fragment", "script"]

PLOTLY = find_spec("plotly") is not None  # the extra `report`
ABREAST = 3
LEAST = 260  # pixels of a panel
MOST_TICKS = 26
WRITTEN = 8  # rows up to which the values stand in the cells
MOST_POINTS = 60  # of a box up to which each is drawn
LETTER = 0.0066  # of the figure's width, a letter of a model's name
FONT = {"family": "system-ui, sans-serif", "size": 12, "color": "#1a1a1a"}


def script() -> str:
    """Plotly's own JavaScript, once for all figures of a page."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def fragment(figure: Figure, palette: Palette) -> tuple[str, int]:
    """Return a figure as a piece of HTML that `script` draws, and the least width in pixels at which it can be read."""
    from plotly.io import to_html
    from plotly.subplots import make_subplots

    panels = list(figure.panels)
    abreast = min(_abreast(panels), len(panels))
    down = -(-len(panels) // abreast)
    height = _height(panels)
    made = make_subplots(
        down, abreast, subplot_titles=[panel.title for panel in panels],
        vertical_spacing=min(0.9 / max(down, 1), 100 / (height * down)), horizontal_spacing=_between(panels),
        shared_yaxes=False if isinstance(panels[0], HeatPanel) else "rows",
    )  # fmt: skip
    shown: set[str] = set()
    for number, panel in enumerate(panels):
        place = {"row": number // abreast + 1, "col": number % abreast + 1}
        if isinstance(panel, HeatPanel):
            _heat(made, panel, number, place)
        elif isinstance(panel, BoxPanel):
            _boxes(made, panel, palette, place, shown)
        elif isinstance(panel, LinePanel):
            _lines(made, panel, palette, place, shown)
    _dress(made, figure, panels, height * down + 120)
    config = {"responsive": True, "displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d"]}
    text = to_html(made, include_plotlyjs=False, full_html=False, config=config, default_width="100%",
                   div_id=f"plot-{figure.name}")  # fmt: skip
    return str(text), LEAST * abreast + 120


def _heat(made: Any, panel: HeatPanel, number: int, place: dict[str, int]) -> None:
    """Add a map; a trace's own axes are numbered like the panels."""
    import plotly.graph_objects as go

    count_y, count_x = panel.values.shape
    names = np.array([[f"{row} → {column}" for column in panel.columns] for row in panel.rows])
    written = "%{z:.2f}" if max(count_x, count_y) <= WRITTEN else None
    made.add_trace(
        go.Heatmap(z=panel.values.astype(np.float32), x=np.arange(count_x), y=np.arange(count_y), text=names,
                   texttemplate=written, textfont={"size": 10},
                   hovertemplate="%{text}: %{z:.3f}<extra></extra>", coloraxis="coloraxis", hoverongaps=False),
        **place,
    )  # fmt: skip
    made.update_yaxes(**_ticks(panel.row_blocks, panel.rows, panel.up), showgrid=False, zeroline=False, **place)
    made.update_xaxes(
        **_ticks(panel.column_blocks, panel.columns, panel.across), showgrid=False, zeroline=False, **place
    )
    axis = "" if number == 0 else str(number + 1)
    made.update_yaxes(scaleanchor=f"x{axis}", constrain="domain", constraintoward="top", **place)  # square cells
    made.update_xaxes(constrain="domain", **place)
    shapes = [
        *_rules("y", axis, np.cumsum([size for _, size in panel.row_blocks])[:-1], "white", 1.5),
        *_rules("x", axis, np.cumsum([size for _, size in panel.column_blocks])[:-1], "white", 1.5),
        *(rule for way in "xy" for rule in _rules(way, axis, panel.cuts, "#D55E00", 3)),
    ]
    made.layout.shapes = (*made.layout.shapes, *shapes)


def _ticks(blocks: Sequence[tuple[str, int]], labels: Sequence[str], title: str) -> dict[str, Any]:
    """Name models in the middle of their blocks, or layers."""
    if blocks:
        sizes = np.array([size for _, size in blocks])
        return {"tickvals": np.cumsum(sizes) - sizes / 2 - 0.5, "ticktext": [name for name, _ in blocks]}
    step = -(-len(labels) // MOST_TICKS)
    shown = list(range(0, len(labels), step))
    return {"tickvals": shown, "ticktext": [labels[n] for n in shown], "title_text": title, "title_standoff": 4}


def _rules(way: str, axis: str, places: Iterable[int], colour: str, width: float) -> list[dict[str, Any]]:
    """Lines before rows (y) or columns (x), as shapes: plotly's own way to add them takes a second for a hundred."""
    other = "x" if way == "y" else "y"
    refs = {f"{way}ref": f"{way}{axis}", f"{other}ref": f"{other}{axis} domain"}
    look = {"type": "line", "line": {"color": colour, "width": width}}
    return [{**look, **refs, f"{way}0": place - 0.5, f"{way}1": place - 0.5, f"{other}0": 0, f"{other}1": 1}
            for place in map(float, places)]  # fmt: skip


def _boxes(made: Any, panel: BoxPanel, palette: Palette, place: dict[str, int], shown: set[str]) -> None:
    import plotly.graph_objects as go

    for series in panel.series:
        look = palette.look(series.meaning)
        across = [name for name, values in zip(panel.across, series.values, strict=True) for _ in values]
        values = [value for own in series.values for value in own]
        points = [point for own in series.points for point in own]
        every = "all" if max(map(len, series.values)) <= MOST_POINTS else "outliers"
        made.add_trace(
            go.Box(x=across, y=values, text=points or None, boxpoints=every, jitter=0.4, pointpos=0,
                   offsetgroup=series.name, hoveron="points+boxes", line={"width": 1.3},
                   marker={"color": look.colour, "size": 3.5, "symbol": look.marker[1]},
                   hovertemplate="%{text}<br>%{x}: %{y:.4g}<extra>" + series.name + "</extra>",
                   **_in_legend(series.name, shown if series.name not in panel.across else {series.name})),
            **place,
        )  # fmt: skip
    made.update_xaxes(type="category", categoryorder="array", categoryarray=list(panel.across), **place)


def _lines(made: Any, panel: LinePanel, palette: Palette, place: dict[str, int], shown: set[str]) -> None:
    """Add lines, beside each other at each place, so that their intervals can be told apart."""
    import plotly.graph_objects as go

    step = min(0.06, 0.4 / len(panel.series))
    for order, series in enumerate(panel.series):
        look = palette.look(series.meaning, series.number)
        middle = np.array([values[0] for values in series.values], dtype=float)
        across = np.arange(len(panel.across)) + step * (order - (len(panel.series) - 1) / 2)
        made.add_trace(
            go.Scatter(x=across, y=middle, error_y=_bars(series, middle), mode="lines+markers", text=list(panel.across),
                       line={"color": look.colour, "dash": look.dash[1], "width": 1.8},
                       marker={"symbol": look.marker[1], "size": 7},
                       hovertemplate="%{text}: %{y:.4g}<extra>" + series.name + "</extra>",
                       **_in_legend(series.name, shown)),
            **place,
        )  # fmt: skip
    made.update_xaxes(**_ticks((), panel.across, ""), zeroline=False, range=[-0.5, len(panel.across) - 0.5], **place)


def _bars(series: Series, middle: NDArray[np.float64]) -> dict[str, Any] | None:
    """The intervals of a line."""
    if not len(series.low):
        return None
    low, high = (np.asarray(ends, dtype=float) for ends in (series.low, series.high))
    return {"type": "data", "symmetric": False, "array": high - middle, "arrayminus": middle - low, "thickness": 1,
            "width": 3}  # fmt: skip


def _in_legend(name: str, shown: set[str]) -> dict[str, Any]:
    """A series is named once, and its entry in the legend switches it in all panels."""
    first = name not in shown
    shown.add(name)
    return {"name": name, "legendgroup": name, "showlegend": first}


def _dress(made: Any, figure: Figure, panels: Sequence[Any], height: float) -> None:
    """Give the whole figure its size, scale and legend."""
    legend = {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"}
    made.update_layout(template="plotly_white", height=height, font=FONT, boxmode=_box_mode(panels), legend=legend,
                       margin={"l": 64, "r": 16, "t": 48, "b": 64}, hoverlabel={"font": {"size": 13}})  # fmt: skip
    made.update_annotations(font_size=12)
    if isinstance(panels[0], HeatPanel):
        ends = sorted(figure.limits) if figure.limits else [None, None]
        bar = {"title": {"text": figure.scale, "side": "right"}, "len": 0.8}
        turned = figure.limits is not None and figure.limits[0] > figure.limits[1]
        made.update_layout(coloraxis={"colorscale": "Viridis", "reversescale": turned, "cmin": ends[0],
                                      "cmax": ends[1], "colorbar": bar})  # fmt: skip
        return
    made.update_yaxes(title_text=figure.scale, col=1)
    made.update_yaxes(exponentformat="power")  # not µ for millionths
    made.update_xaxes(title_text=figure.across, title_standoff=4)
    if figure.limits:
        made.update_yaxes(range=list(figure.limits))


def _box_mode(panels: Sequence[Any]) -> str:
    """Boxes stand beside each other, unless no place has several: then each above its name."""
    counts = (
        sum(bool(len(series.values[place])) for series in panel.series)
        for panel in panels if isinstance(panel, BoxPanel) for place in range(len(panel.across))
    )  # fmt: skip
    return "group" if max(counts, default=0) > 1 else "overlay"


def _abreast(panels: Sequence[Any]) -> int:
    """How many panels side by side: fewer where they hold much."""
    if isinstance(panels[0], HeatPanel):
        cells = max(max(panel.values.shape) for panel in panels)
        return ABREAST if cells <= 26 else 2 if cells <= 60 else 1
    return ABREAST if max(len(panel.across) for panel in panels) <= 14 else 2


def _between(panels: Sequence[Any]) -> float:
    """Room between panels, as a share of the figure: for numbers, or for the names of models beside their blocks."""
    letters = max((len(name) for panel in panels if isinstance(panel, HeatPanel) for name, _ in panel.row_blocks),
                  default=0)  # fmt: skip
    return max(0.09, 0.02 + LETTER * letters)


def _height(panels: Sequence[Any]) -> int:
    """Pixels of a panel."""
    height = {3: 340, 2: 460, 1: 760}[_abreast(panels)]
    return max(height, 460) if len(panels) == 1 and isinstance(panels[0], HeatPanel) else height
