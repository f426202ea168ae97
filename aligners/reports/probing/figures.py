"""Figures on probes: scores by layer, by rank, and the trees of a few sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc

from aligners.reports.drawing import COLOURS, MODEL_COLOURS, PANEL, Look, dress, line_look, lines_by_site, panels
from aligners.reports.probing.lines import BASELINES, MEASURES, Line, lines_of, ranks_of, sites_of, tasks_of
from aligners.reports.report import Row

__all__ = ["layers_figure", "ranks_figure", "trees_figure"]

ABREAST = 3
WIDTH = 0.62  # inches a word takes
RIGHT, WRONG = COLOURS[2], COLOURS[1]


def layers_figure(rows: Sequence[Row]) -> Figure:
    """Draw every score by layer with its controls, a panel for each task and measure."""
    shown = [(task, column, said) for task, probe in tasks_of(rows) for column, said in MEASURES[probe].items()]
    figure, axes = panels(len(shown), ABREAST, PANEL, (2.2, 0.8))
    models = list(dict.fromkeys(row["model"] for row in rows))
    for axis, (task, column, said) in zip(axes, shown, strict=True):
        own = [row for row in rows if row["task"] == task]
        sites = sites_of(own)
        lines = [each for m, model in enumerate(models) for each in _drawn(own, m, model, column, len(models) > 1)]
        lines_by_site(axis, [(name, look, line.cells) for name, look, line in lines if line.interval], column, 100)
        for name, look, line in lines:
            if not line.interval:
                _bare(axis, name, look, line)
        floor = next(row for row in own if row["source"] in BASELINES)
        if floor[column] is not None:
            axis.axhline(100 * floor[column], label="baseline", color="0.6", linestyle=":", zorder=0)
        axis.set_title(f"{task}: {said}", fontsize=10)
        axis.set_xticks(range(len(sites)), ["mix" if site is None else str(site) for site in sites])
    dress(figure, axes, "site (layer)", "score, in hundredths")
    return figure


def _drawn(rows: Sequence[Row], m: int, model: str, column: str, several: bool) -> Iterator[tuple[str, Look, Line]]:
    """The lines of a model in a panel: its colour says which model, the line what was read."""
    own = [row for row in rows if row["model"] == model]
    highest = ranks_of([row for row in own if row["source"] not in BASELINES])[-1]
    here = [row for row in own if row["rank"] == highest and row["source"] not in BASELINES]
    for line in lines_of(here, sites_of(rows)):
        look = _look(line, m)
        if line.column in (column, "control") and (line.column != "control" or column == "score"):
            kind = line.said.partition(", ")[2] or ("control task" if line.column == "control" else "trained")
            yield f"{model}, {kind}" if several else kind, look, line


def _look(line: Line, m: int) -> Look:
    place = 2 if line.column == "control" else 1 if line.said.endswith("untrained") else 0
    return line_look(m if m else place, place, ("-", "--", ":")[place], MODEL_COLOURS)


def _bare(axis: Axes, name: str, look: Look, line: Line) -> None:
    """Draw a line that has no interval."""
    here = [(place, 100 * row[line.column]) for place, row in enumerate(line.cells) if row is not None]
    axis.plot(*zip(*here, strict=True), label=name, **look)


def ranks_figure(rows: Sequence[Row]) -> Figure:
    """Draw the scores of structural probes by rank, a line for each site of each model."""
    shown = [(task, *each) for task, probe in tasks_of(rows) if probe != "edge" for each in MEASURES[probe].items()]
    figure, axes = panels(len(shown), ABREAST, PANEL, (2.2, 0.8))
    for axis, (task, column, said) in zip(axes, shown, strict=True):
        own = [row for row in rows if row["task"] == task and row["source"] == "model"]
        ranks = ranks_of(own)
        places = list(dict.fromkeys((row["model"], row["site"]) for row in own))
        for number, (model, site) in enumerate(places):
            found = {row["rank"]: row[column] for row in own if (row["model"], row["site"]) == (model, site)}
            values = [np.nan if found[rank] is None else 100 * found[rank] for rank in ranks]
            axis.plot(
                range(len(ranks)),
                values,
                label=f"{model}, site {site}",
                **line_look(number, number, "-", MODEL_COLOURS),
            )
        axis.set_xticks(range(len(ranks)), [str(rank) for rank in ranks])
        axis.set_title(f"{task}: {said}", fontsize=10)
    dress(figure, axes, "rank of the probe", "score, in hundredths")
    return figure


def trees_figure(trees: Sequence[Row]) -> Figure:
    """Draw sentences with the edges of their trees above and those that a probe finds below."""
    longest = max(len(row["words"].split()) for row in trees)
    figure, axes = panels(len(trees), 1, (WIDTH * longest, 2.4), (0.4, 0.3))
    for axis, row in zip(axes, trees, strict=True):
        _tree(axis, row)
        axis.set_xlim(-0.7, longest - 0.3)
    said = "above: the tree, pale where punctuation does not count; below: what the probe finds, right edges green"
    figure.supxlabel(said, fontsize=9)
    return figure


def _tree(axis: Axes, row: Row) -> None:
    words, counted, found = row["words"].split(), _edges(row["counted"]), _edges(row["found"])
    punctuated = _edges(row["edges"]) - counted
    for place, word in enumerate(words):
        axis.text(place, 0, word, ha="center", va="center", fontsize=8)
    for edges, side, colour in (
        (counted, 1, "0.3"), (punctuated, 1, "0.8"), (found & counted, -1, RIGHT), (found - counted, -1, WRONG),
    ):  # fmt: skip
        for first, last in edges:
            start, end = (0, 180) if side > 0 else (180, 360)
            arc = Arc(((first + last) / 2, side * 0.35), last - first, 1.1 * (last - first) ** 0.8, color=colour)
            arc.theta1, arc.theta2 = start, end
            axis.add_patch(arc)
    tall = max(0.35 + 0.6 * (last - first) ** 0.8 for first, last in counted | punctuated | found)
    axis.set_ylim(-tall, tall)
    axis.set_title(f"{row['model']}, site {row['layer']}: {len(counted & found)} of {len(counted)} edges", fontsize=9)
    axis.set_axis_off()


def _edges(written: str) -> set[tuple[int, int]]:
    return {(int(first), int(last)) for first, _, last in (edge.partition("-") for edge in written.split())}
