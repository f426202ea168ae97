"""What the table and the figure on probes share: a line for each task, what was read, and the sites across."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from aligners.reports.report import Row

__all__ = ["BASELINES", "MEASURES", "Line", "lines_of", "ranks_of", "sites_of", "tasks_of"]

BASELINES = ("majority", "word order")
MEASURES = {  # probe -> column of its scores -> what it is called
    "edge": {"score": "F1"},
    "distance": {"score": "Spearman", "uuas": "UUAS"},
    "depth": {"score": "Spearman", "root_accuracy": "root"},
}


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


def tasks_of(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Tasks and their probes, in order."""
    return list(dict.fromkeys((row["task"], row["probe"]) for row in rows))


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
    own = {source: {row["site"]: row for row in rows if row["source"] == source} for source in ("model", "untrained")}
    found = []
    for column, said in MEASURES[rows[0]["probe"]].items():
        found.append(Line(said, column, [own["model"].get(site) for site in sites]))
        if own["untrained"]:
            found.append(Line(f"{said}, untrained", column, [own["untrained"].get(site) for site in sites]))
    asked = [row if row and row["control"] is not None else None for row in (own["model"].get(s) for s in sites)]
    if any(asked):
        found.append(Line("control task", "control", asked, interval=False))
        found.append(Line("selectivity", "selectivity", asked))
    return found
