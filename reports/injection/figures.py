"""Figures of an injection: error, penalty and accuracy, site by site."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aligners.fitting.outcomes import TRAINED_WELL
from reports.drawing import Look, line_look, lines_by_site, number, panels, penalty_scale, shown_lines
from reports.injection.words import of_tokens, panel_title, panels_of
from reports.names import site_name
from reports.report import Row
from reports.words import score_words

__all__ = ["accuracy_figure", "fvu_figure", "penalty_figure"]

FVU_TOP = 10.0  # an inverse can be worse than the mean by any factor; the lines below 1 are what one wants to see
FVU_LABELS = {
    "fvu": "FVU: share of variance left unexplained",
    "fvu_unseen": "FVU on types that no map saw",
    "fvu_other": "FVU on the other text",
}
LEVELS: dict[str, Look] = {
    "native_y": {"color": "0.1", "linestyle": "-"},
    "native_x": {"color": "0.1", "linestyle": "--"},
    "random_classifier": {"color": "0.5", "linestyle": "-."},
    "random_label": {"color": "0.5", "linestyle": (0, (1, 3))},
    "constant_label": {"color": "0.5", "linestyle": (0, (6, 3))},
    "unigram": {"color": "0.5", "linestyle": (0, (6, 3))},
}


def fvu_figure(rows: Sequence[Row]) -> Figure:
    """Draw FVU against site, a line for each method, a panel for each direction; logarithmic.

    Below it, where they are known: FVU on the rows of unseen types, and on another source of text.
    """
    heights = [name for name in FVU_LABELS if name == "fvu" or any(row.get(name) is not None for row in rows)]
    figure, axes = _panels(rows, len(heights))
    beyond: dict[str, None] = {}
    starts: set[str] = set()
    for axis, (height, panel) in zip(axes, product(heights, panels_of(rows)), strict=True):
        for name, style, line in _lines(panel, _styles(rows)):
            shown, untrained = _fvu_line(axis, name, style, line, height)
            starts |= {name} if untrained else set()
            if not all(map(math.isfinite, shown)):
                beyond[f"{name} into {line[0]['model_y']}"] = None
        axis.axhline(1, color="0.6", linewidth=0.8, zorder=0)
        axis.set_yscale("log")
        _label(axis, panel_title(panel) if height == "fvu" else "", _sites(panel), FVU_LABELS[height])
    _legend(axes)
    notes = [f"above {FVU_TOP:g}, off the scale: {', '.join(beyond)}"] if beyond else []
    notes += [f"hollow: untrained start, or set back ({', '.join(sorted(starts))})"] if starts else []
    if notes:
        figure.supxlabel("; ".join(notes), fontsize=7.5, color="0.35")
    return figure


def _fvu_line(axis: Axes, name: str, style: Look, line: list[Row], height: str) -> tuple[list[float], bool]:
    """Draw one method; its values, NaN off the scale, and whether some site is not what training made of it."""
    values = [number(row.get(height)) for row in line]
    shown = [value if value < FVU_TOP else math.nan for value in values]
    axis.plot(range(len(line)), shown, label=name if any(map(math.isfinite, shown)) else None, **style)
    untrained = [s for s, row in enumerate(line) if row.get("training") not in (None, TRAINED_WELL)]
    hollow = {"linestyle": "none", "markerfacecolor": "white", "markersize": 8}
    axis.plot(untrained, [shown[s] for s in untrained], **{**style, **hollow})
    return shown, bool(untrained)


def penalty_figure(rows: Sequence[Row]) -> Figure:
    """Draw by how much injection raises a language model's loss, with intervals and floors; logarithmic."""
    of_models = [panel for panel in panels_of(rows) if of_tokens(panel)]
    levels = [row for panel in of_models for row in panel if row["site_x"] is None and row["role"] == "floor"]
    return _measured(of_models, levels, "penalty", 1, "penalty of injection, nats a token", penalty_scale)


def accuracy_figure(rows: Sequence[Row]) -> Figure:
    """Draw the task's score after injection, with intervals, between the ceiling and the floors."""
    scored = [panel for panel in panels_of(rows) if any(row["score"] is not None for row in panel)]
    levels = [row for panel in scored for row in panel if row["site_x"] is None]
    return _measured(scored, levels, "score", 100, f"after injection: {score_words(rows)}")


def _measured(
    shown: Sequence[list[Row]],
    levels: Sequence[Row],
    column: str,
    scale: float,
    height: str,
    rescale: Callable[[Axes], None] = lambda axis: None,
) -> Figure:
    """Draw a column of each panel against site, and rows without a site as levels."""
    rows = [row for panel in shown for row in panel]
    figure, axes = _panels(rows)
    for axis, panel in zip(axes, shown, strict=True):
        lines_by_site(axis, _lines(panel, _styles(rows)), column, scale)
        for row in levels:
            if row in panel and row[column] is not None:
                look = LEVELS[row["method"]]
                axis.axhline(scale * row[column], label=row["method"], linewidth=1, zorder=0, **look)
        rescale(axis)
        _label(axis, panel_title(panel), _sites(panel), height)
    _legend(axes)
    return figure


def _panels(rows: Sequence[Row], over: int = 1) -> tuple[Figure, list[Axes]]:
    """Make a figure with a column of `over` panels for each direction and kind of rows."""
    count = len(panels_of(rows))
    return panels(over * count, count, (4.6, 3.1), (1.9, 1.1), sharey=True)


def _styles(rows: Sequence[Row]) -> dict[str, Look]:
    """How to draw each method that has sites, the same in every panel: closed forms dashed, floors dotted."""
    roles = {row["method"]: row["role"] for row in rows if row["site_x"] is not None}
    solved = {row["method"] for row in rows if row.get("fit") == "closed form"}
    styles: dict[str, Look] = {}
    for place, name in enumerate(sorted(roles, key=lambda name: roles[name] == "floor")):
        styles[name] = line_look(place, place, "--" if name in solved else "-")
        if roles[name] == "floor":
            styles[name] |= {"color": "0.6", "linestyle": ":"}
    return styles


def _lines(panel: list[Row], styles: dict[str, Look]) -> list[tuple[str, Look, list[Row]]]:
    """(name, style, rows by site) of every method that has sites, in the order of `styles`."""
    lines = [(name, style, [row for row in panel if row["method"] == name]) for name, style in styles.items()]
    return [entry for entry in lines if entry[2]]


def _sites(panel: list[Row]) -> list[str]:
    pairs = dict.fromkeys((row["site_x"], row["site_y"]) for row in panel if row["site_x"] is not None)
    return [site_name(pair) for pair in pairs]


def _label(axis: Axes, title: str, sites: list[str], height: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xticks(range(len(sites)), sites)
    axis.set_xlabel("site (layer)")
    if axis.get_subplotspec().is_first_col():  # type: ignore[union-attr]
        axis.set_ylabel(height)


def _legend(axes: Sequence[Axes]) -> None:
    """Add one legend for all panels."""
    axes[-1].legend(*shown_lines(axes), loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
