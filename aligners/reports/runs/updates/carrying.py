"""The report of carrying: what becomes of each artefact, said without labels, and its scores with them."""

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aligners.reports.drawing import LOOKS, Look, dress, panels
from aligners.reports.names import WORDS, site_name, with_interval, with_short_names
from aligners.reports.report import Report, Row, distinct, where
from aligners.reports.screen import SiteTable

SCORES: dict[str, Look] = LOOKS["carrying"]
PREDICTED = {"": ("carried", "predicted, carried"), "stale_": ("stale", "predicted, stale")}


def report(meta: Row, rows: Sequence[Row], scores: Sequence[Row] = (), maps: Sequence[Row] = ()) -> Report:
    """Make the report.

    Args:
        meta: what holds for all rows.
        rows: one for each artefact.
        scores: where there are labels, one for each artefact and condition.
        maps: one for each artefact, site and map that was tried.
    """
    shown = with_short_names(rows)
    screen = [_fates(shown), *([_scores(scores)] if scores else []), _maps(maps)]
    figures = {"carrying": partial(figure, shown, scores)}
    return Report("carrying", meta, rows, {"scores": scores, "maps": maps}, figures=figures, screen=screen)


def _fates(rows: Sequence[Row]) -> SiteTable:
    """What is said without labels."""
    said = WORDS["carrying"]
    title = f"{rows[0]['model_x']} → {rows[0]['model_y']}: said without labels, on {rows[0]['n_texts']} held-out texts"
    headings = [f"{side}\n{heading}" for side in ("carried", "as it is") for heading in said.values()]
    table = SiteTable(title, ["artefact", "kind", "site", "map", "verdict"], headings, {})
    for row in rows:
        cells = [with_interval(row, side + name, ".3f") for side in ("", "stale_") for name in said]
        site = site_name((row["site_x"], row["site_y"]))
        table.add_row(row["artefact"], row["kind"], site, f"{row['map']}, {row['fitted_on']}", row["verdict"], *cells)
    return table


def _scores(scores: Sequence[Row]) -> SiteTable:
    """AUROC and accuracy against labels, a line for each artefact."""
    groups = {heading: list(SCORES) for heading in ("AUROC", "accuracy")}
    table = SiteTable("Against the labels of held-out texts", ["artefact"], [], groups)
    for name in distinct(scores, "artefact"):
        of = {row["condition"]: row for row in where(scores, artefact=name)}
        cells = (with_interval(of.get(c, {}), column, ".3f") for column in ("auroc", "accuracy") for c in SCORES)
        table.add_row(name, *cells)
    return table


def _maps(maps: Sequence[Row]) -> SiteTable:
    """How much of an artefact's answers each map misses on validation texts, at its best site."""
    names = distinct(maps, "map", "fitted_on")
    title = "Share of the variance of an artefact's answers that each map misses, validation texts, best site"
    table = SiteTable(title, ["artefact"], [], {"": [f"{name}, {rows}" for name, rows in names]})
    for artefact in distinct(maps, "artefact"):
        errors = [[row["error"] for row in where(maps, artefact=artefact, map=m, fitted_on=on)] for m, on in names]
        table.add_row(artefact, *(f"{min(values):.4f}" if values else "" for values in errors))
    return table


def figure(rows: Sequence[Row], scores: Sequence[Row]) -> Figure:
    """Draw the AUROC of each artefact: native, stale, carried, trained anew and floors, beside what was predicted."""
    drawn, (axis,) = panels(1, 1, (6.0, 0.8 + 0.6 * len(rows)), (2.0, 0.4))
    for place, row in enumerate(rows):
        for side, (like, name) in PREDICTED.items():
            if row[f"{side}predicted"] is not None:
                look = {**SCORES[like], "marker": "D", "markersize": 8, "markerfacecolor": "none", "alpha": 0.7}
                _point(axis, row, f"{side}predicted", place + 0.12, name, look)
        for condition, look in SCORES.items():
            for score in where(scores, artefact=row["artefact"], condition=condition):
                _point(axis, score, "auroc", place - 0.12, condition, {**look, "markersize": 5})
    axis.axvline(0.5, color="0.8", linewidth=0.8, zorder=0)
    axis.set_yticks(range(len(rows)), [f"{row['artefact']}\n{row['verdict']}" for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    dress(drawn, [axis], "AUROC", "", f"{rows[0]['model_x']} → {rows[0]['model_y']}")
    return drawn


def _point(axis: Axes, row: Row, column: str, place: float, name: str, look: Look) -> None:
    """A value with its interval."""
    value, low, high = (row[column + end] for end in ("", "_low", "_high"))
    if value is not None:
        bars = None if low is None else [[max(value - low, 0)], [max(high - value, 0)]]
        axis.errorbar([value], [place], xerr=bars, label=name, linestyle="none", elinewidth=0.9, **look)
