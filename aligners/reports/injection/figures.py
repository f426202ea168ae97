"""Figures of an injection: error, penalty and accuracy, site by site."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aligners.reports.drawing import (
    HOLLOW,
    PANEL,
    Look,
    SitePanel,
    dress,
    hollow_where_untrained,
    log_scale,
    method_looks,
    name_sites,
    number,
    panels,
    shared_out,
    site_figure,
)
from aligners.reports.injection.words import of_tokens, panel_title, panels_of
from aligners.reports.report import Row
from aligners.reports.words import score_words

__all__ = ["accuracy_figure", "fvu_figure", "penalty_figure"]

KINDS = CLOSED, OTHERS, FLOORS = "closed forms", "trained maps", "floors"
FVU_TOP = 10.0  # an inverse can be arbitrarily worse than the mean, and would squeeze the lines below 1
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
    """Draw FVU against site on a logarithmic scale: a line for each method, panels for each direction.

    Where they are known, FVU on the rows of unseen types and on another source of text follow below.
    """
    heights = [name for name in FVU_LABELS if name == "fvu" or any(row.get(name) is not None for row in rows)]
    styles = _styles(rows)
    parts = [part for panel in panels_of(rows) for part in _parts(panel, styles)]
    figure, axes = panels(len(heights) * len(parts), len(parts), PANEL, (1.9, 1.1), sharey=True)
    beyond: dict[str, None] = {}
    starts: set[str] = set()
    for axis, (height, part) in zip(axes, product(heights, parts), strict=True):
        for name, style, cells in part.lines:
            line = [row for row in cells if row is not None]
            shown, untrained = _fvu_line(axis, name, style, line, height)
            starts |= {name} if untrained else set()
            if not all(map(math.isfinite, shown)):
                beyond[f"{name} into {line[0]['model_y']}"] = None
        axis.axhline(1, color="0.6", linewidth=0.8, zorder=0)
        name_sites(axis, part.title if height == "fvu" else "", part.pairs)
        if part is parts[0]:
            axis.set_ylabel(FVU_LABELS[height])
    log_scale(axes)
    notes = [f"above {FVU_TOP:g}, off the scale: {', '.join(beyond)}"] if beyond else []
    notes += [f"{HOLLOW} ({', '.join(sorted(starts))})"] if starts else []
    dress(figure, axes, "\n".join(["site (layer)", *notes]), "")
    return figure


def _fvu_line(axis: Axes, name: str, style: Look, line: list[Row], height: str) -> tuple[list[float], bool]:
    """Draw one method. Return its values, NaN off the scale, and whether training did not improve it at some site."""
    values = [number(row.get(height)) for row in line]
    shown = [value if value < FVU_TOP else math.nan for value in values]
    axis.plot(range(len(line)), shown, label=name if any(map(math.isfinite, shown)) else None, **style)
    return shown, hollow_where_untrained(axis, range(len(line)), shown, line, style)


def penalty_figure(rows: Sequence[Row]) -> Figure:
    """Draw how much injection raises a language model's loss, with intervals and floors."""
    of_models = [panel for panel in panels_of(rows) if of_tokens(panel)]
    return _by_site(of_models, ("floor",), "penalty", "penalty of injection, nats a token")


def accuracy_figure(rows: Sequence[Row]) -> Figure:
    """Draw the task's score after injection, with intervals, between the ceiling and the floors."""
    scored = [panel for panel in panels_of(rows) if any(row["score"] is not None for row in panel)]
    return _by_site(scored, ("ceiling", "floor"), "score", f"after injection: {score_words(rows)}", 100)


def _by_site(shown: Sequence[list[Row]], roles: Sequence[str], column: str, up: str, scale: float = 1) -> Figure:
    """Draw a column against site; rows without a site are levels if they have one of `roles`."""
    styles = _styles([row for panel in shown for row in panel])
    each = []
    for panel in shown:
        without = [row for row in panel if row["site_x"] is None and row["role"] in roles and row[column] is not None]
        levels = [(row["method"], {"linewidth": 1, **LEVELS[row["method"]]}, row[column]) for row in without]
        each += [part._replace(levels=levels) for part in _parts(panel, styles)]
    return site_figure(each, column, up, scale)


def _parts(panel: list[Row], styles: dict[str, Look]) -> list[SitePanel]:
    """Draw a panel's lines in as few panels as can be read: closed forms, trained maps and floors."""
    lines = {name: (name, style, line) for name, style, line in _lines(panel, styles)}
    kinds: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name, style, line in lines.values():
        kinds[FLOORS if line[0]["role"] == "floor" else CLOSED if style["linestyle"] == "--" else OTHERS].append(name)
    shares = shared_out(kinds.values())
    title, pairs = panel_title(panel), _pairs(panel)
    if len(shares) == 1:
        return [SitePanel(title, pairs, list(lines.values()))]
    said = (" and ".join(kind for kind in KINDS if set(kinds[kind]) & set(share)) for share in shares)
    return [
        SitePanel(f"{title}\n{kind}", pairs, [lines[name] for name in share])
        for kind, share in zip(said, shares, strict=True)
    ]


def _styles(rows: Sequence[Row]) -> dict[str, Look]:
    """Say how to draw each method that has sites, in every panel: closed forms dashed, floors dotted."""
    roles = {row["method"]: row["role"] for row in rows if row["site_x"] is not None}
    solved = {row["method"] for row in rows if row.get("fit") == "closed form"}
    styles = method_looks(sorted(roles, key=lambda name: roles[name] == "floor"))
    for name in solved:
        if roles.get(name, "floor") != "floor":
            styles[name]["linestyle"] = "--"
    return styles


def _lines(panel: list[Row], styles: dict[str, Look]) -> list[tuple[str, Look, list[Row]]]:
    """Return (name, style, rows by site) of every method that has sites, in the order of `styles`."""
    lines = [(name, style, [row for row in panel if row["method"] == name]) for name, style in styles.items()]
    return [entry for entry in lines if entry[2]]


def _pairs(panel: list[Row]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((row["site_x"], row["site_y"]) for row in panel if row["site_x"] is not None))
