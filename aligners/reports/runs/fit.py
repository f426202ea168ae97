"""The report of a fit: the validation figures of every aligner."""

from collections.abc import Sequence
from functools import partial
from statistics import median

from aligners.fitting.outcomes import mark, no_better_than_the_mean, what_did_not_train, worst_of
from aligners.reports.names import aligned, site_name, with_short_names
from aligners.reports.report import Report, Row, distinct, grouped, is_known
from aligners.reports.runs.injection import fvu_figure, retrieval
from aligners.reports.screen import SiteTable

MOST_PAIRS = 12  # of models with a panel each
MEDIANS = ("fvu", "fvu_unseen")
UNSEEN = "FVU on their rows of types that were left out of fitting"
RETRIEVED = "top 1, share of mapped rows whose partner is the nearest of the target's"


def report(meta: Row, rows: Sequence[Row], measured: str = "on the validation texts") -> Report:
    """Make the report from one row for each aligner, direction and site pair.

    Args:
        meta: what holds for all rows.
        rows: the rows.
        measured: on what, in words.
    """
    shown, tables = with_short_names(rows), {"fvu": f"FVU {measured}", "fvu_unseen": UNSEEN, "top1_all": RETRIEVED}
    known = [_table(shown, name, on) for name, on in tables.items() if is_known(shown, name)]
    figures = {"fvu": partial(fvu_figure, _few_panels(shown))}
    findings = [*no_better_than_the_mean(rows), *retrieval(shown), *what_did_not_train(shown)]
    return Report("summary", meta, rows, figures=figures, screen=known, sentences=findings)


def _few_panels(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows to draw: of more than a dozen pairs of models their medians, as one pair."""
    pairs = distinct(rows, "model_x", "model_y")
    if len(pairs) <= MOST_PAIRS:
        return rows
    ends = {"model_x": "X", "model_y": f"Y, median of {len(pairs)} pairs"}
    medians = []
    for group in grouped(rows, "method", "direction", "site_x", "site_y").values():
        known = {name: [row[name] for row in group if row.get(name) is not None] for name in MEDIANS}
        medians.append(worst_of(group) | ends | {name: median(each) if each else None for name, each in known.items()})
    return medians


def _table(rows: Sequence[Row], column: str, said: str) -> SiteTable:
    """Make a table with aligners down and sites across; a star marks a map that training did not improve."""
    pairs = grouped(rows, "model_x", "model_y").values()
    lines = {key: line for pair in pairs for key, line in grouped(pair, "model_x", "model_y", "method").items()}
    sites = [site_name((row["site_x"], row["site_y"])) for row in next(iter(lines.values()))]
    table = SiteTable(f"{said}, by site pair", ["models", "fit", "aligner"], [], {"": sites})
    for (x, y, method), line in lines.items():
        cells = (mark(aligned(row[column]), row) for row in line)
        table.add_row(f"{x} → {y}", line[0].get("fit") or "", method, *cells)
    return table
