"""The report of a fit: the validation figures of every aligner."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

from rich.table import Table

from aligners.fitting.outcomes import mark, no_better_than_the_mean, what_did_not_train, worst_of
from aligners.reports.injection.figures import fvu_figure
from aligners.reports.names import site_name, with_short_names
from aligners.reports.report import Report, Row
from aligners.reports.screen import site_table

__all__ = ["report"]

MOST_PAIRS = 12  # of models with a panel each
MEDIANS = ("fvu", "fvu_unseen")
UNSEEN = "on their rows of types that were left out of fitting"


def report(meta: Row, rows: Sequence[Row], measured: str = "on the validation texts") -> Report:
    """Make the report from one row for each aligner, direction and site pair.

    Args:
        meta: what holds for all rows.
        rows: the rows.
        measured: on what, in words.
    """
    shown, tables = with_short_names(rows), {"fvu": measured, "fvu_unseen": UNSEEN}
    return Report(
        "summary",
        meta,
        rows,
        figures={"fvu": partial(fvu_figure, _few_panels(shown))},
        screen=[
            _table(shown, name, said) for name, said in tables.items() if any(row[name] is not None for row in shown)
        ],
        sentences=[*no_better_than_the_mean(rows), *what_did_not_train(shown)],
        files="Figures of the fit",
    )


def _few_panels(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows to draw: of more than a dozen pairs of models their medians, as one pair."""
    pairs = {(row["model_x"], row["model_y"]) for row in rows}
    if len(pairs) <= MOST_PAIRS:
        return rows
    places: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        place = row["method"], row.get("direction"), row["site_x"], row["site_y"]
        places.setdefault(place, []).append(row)
    ends = {"model_x": "X", "model_y": f"Y, median of {len(pairs)} pairs"}
    return [{**worst_of(own), **ends, **{name: _median(own, name) for name in MEDIANS}} for own in places.values()]


def _median(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return median(values) if values else None


def _table(rows: Sequence[Row], column: str, said: str) -> Table:
    """Make a table with aligners down and sites across; a star marks a map that training did not improve."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(f"{row['model_x']} → {row['model_y']}  {row['method']}", []).append(row)
    sites = [site_name((row["site_x"], row["site_y"])) for row in next(iter(lines.values()))]
    table = site_table(f"FVU {said}, by site pair", ["aligner"], [], {"": sites})
    for name, line in lines.items():
        table.add_row(name, *(mark(f"{row[column]:.3f}", row) for row in line))
    return table
