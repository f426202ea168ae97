"""Lines of scores on probes, and their figures: by layer, by rank, and the trees of a few sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc

from aligners.reports.drawing import COLOURS, MODEL_COLOURS, PANEL, Look, dress, line_look, lines_by_site, panels
from aligners.reports.report import Row, distinct, grouped, number, where

BASELINES = ("majority", "word order")
MEASURES = {  # probe -> column of its scores -> what it is called
    "edge": {"score": "F1"},
    "distance": {"score": "Spearman", "uuas": "UUAS"},
    "depth": {"score": "Spearman", "root_accuracy": "root"},
}
ABREAST = 3
WIDTH = 0.62  # inches a word takes
RIGHT, WRONG = COLOURS[2], COLOURS[1]


class Line(NamedTuple):
    """A line of the table, or of a panel of the figure.

    Attributes:
        said: what it shows.
        column: of the rows, from which it is taken.
        cells: a row for each site, None where there is none.
        interval: whether the column has ends of an interval.
    """

    said: str
    column: str
    cells: Sequence[Row | None]
    interval: bool = True


def site_word(site: int | None) -> str:
    """A layer for readers; None is a learned mix of all."""
    return "mix" if site is None else str(site)


def sites_of(rows: Sequence[Row]) -> list[int | None]:
    """The layers that any probe reads, then None if there are mixes."""
    sited = [row["site"] for row in rows if row["source"] not in BASELINES]
    return sorted({site for site in sited if site is not None}) + ([None] if None in sited else [])


def ranks_of(rows: Iterable[Row]) -> list[int | None]:
    """The ranks of structural probes, ascending; None stands for full rank."""
    found = {row["rank"] for row in rows}
    return sorted((rank for rank in found if rank is not None), key=int) or [None]


def lines_of(rows: Sequence[Row], sites: Sequence[int | None]) -> list[Line]:
    """The lines of one model, task and rank: what is read of the model, and the controls.

    Args:
        rows: of that model, task and rank.
        sites: across.
    """
    trained, untrained = ({row["site"]: row for row in where(rows, source=each)} for each in ("model", "untrained"))
    lines = []
    for column, said in MEASURES[rows[0]["probe"]].items():
        lines.append(Line(said, column, [trained.get(site) for site in sites]))
        if untrained:
            lines.append(Line(f"{said}, untrained", column, [untrained.get(site) for site in sites]))
    asked = [row if row and row["control"] is not None else None for row in map(trained.get, sites)]
    if any(asked):
        lines.append(Line("control task", "control", asked, interval=False))
        lines.append(Line("selectivity", "selectivity", asked))
    return lines


def layers_figure(rows: Sequence[Row]) -> Figure:
    """Draw every score by layer with its controls, a panel for each task and measure."""
    shown = [
        (task, column, said)
        for task, probe in distinct(rows, "task", "probe")
        for column, said in MEASURES[probe].items()
    ]
    figure, axes = panels(len(shown), ABREAST, PANEL, (2.2, 0.8))
    models = distinct(rows, "model")
    for axis, (task, column, said) in zip(axes, shown, strict=True):
        own = where(rows, task=task)
        sites = sites_of(own)
        lines = [each for m, model in enumerate(models) for each in _drawn(own, m, model, column, len(models) > 1)]
        lines_by_site(axis, [(name, look, line.cells) for name, look, line in lines if line.interval], column, 100)
        for name, look, line in lines:
            if not line.interval:
                here = [(place, 100 * row[line.column]) for place, row in enumerate(line.cells) if row is not None]
                axis.plot(*zip(*here, strict=True), label=name, **look)
        floor = next(row for row in own if row["source"] in BASELINES)
        if floor[column] is not None:
            axis.axhline(100 * floor[column], label="baseline", color="0.6", linestyle=":", zorder=0)
        axis.set_title(f"{task}: {said}", fontsize=10)
        axis.set_xticks(range(len(sites)), [site_word(site) for site in sites])
    dress(figure, axes, "site (layer)", "score, in hundredths")
    return figure


def _drawn(rows: Sequence[Row], m: int, model: str, column: str, several: bool) -> Iterator[tuple[str, Look, Line]]:
    """The lines of a model in a panel: its colour says which model, the line what was read."""
    own = [row for row in where(rows, model=model) if row["source"] not in BASELINES]
    for line in lines_of(where(own, rank=ranks_of(own)[-1]), sites_of(rows)):
        place = 2 if line.column == "control" else 1 if line.said.endswith("untrained") else 0
        look = line_look(m if m else place, place, ("-", "--", ":")[place], MODEL_COLOURS)
        if line.column in (column, "control") and (line.column != "control" or column == "score"):
            kind = line.said.partition(", ")[2] or ("control task" if line.column == "control" else "trained")
            yield f"{model}, {kind}" if several else kind, look, line


def ranks_figure(rows: Sequence[Row]) -> Figure:
    """Draw the scores of structural probes by rank, a line for each site of each model."""
    shown = [
        (task, *each)
        for task, probe in distinct(rows, "task", "probe")
        if probe != "edge"
        for each in MEASURES[probe].items()
    ]
    figure, axes = panels(len(shown), ABREAST, PANEL, (2.2, 0.8))
    for axis, (task, column, said) in zip(axes, shown, strict=True):
        own = where(rows, task=task, source="model")
        ranks = ranks_of(own)
        for place, ((model, site), line) in enumerate(grouped(own, "model", "site").items()):
            scores = {row["rank"]: 100 * number(row[column]) for row in line}
            look = line_look(place, place, "-", MODEL_COLOURS)
            axis.plot(range(len(ranks)), [scores[rank] for rank in ranks], label=f"{model}, site {site}", **look)
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
