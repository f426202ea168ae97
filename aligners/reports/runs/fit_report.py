"""The report of a fit: the validation figures of every aligner."""

from collections.abc import Sequence
from functools import partial
from statistics import median

from aligners.fitting.training_status import (
    beside_far_rows,
    mark,
    no_better_than_the_mean,
    what_did_not_train,
    worst_of,
)
from aligners.reports.closest import (
    beside,
    closest,
    known_lines,
    share_range,
    trained,
    unexplained,
    with_training,
)
from aligners.reports.names import aligned, site_name, with_short_names
from aligners.reports.report import Report, Row, all_known, distinct, grouped, is_known, where
from aligners.reports.runs.injection_report import fvu_figure, retrieval
from aligners.reports.screen import SiteTable

MOST_PAIRS = 12  # of models with a panel each
MEASURED = "on the validation texts"
MEDIANS = ("fvu", "fvu_unseen")
FAR = {
    "fvu_with_far": "FVU with the rows far from all others",
    "fvu_without_far": "FVU without them",
}
UNSEEN = "FVU on their rows of types that were left out of fitting"
RETRIEVED = "top 1 of all, share of mapped rows whose partner is the nearest of the target's"


def report(meta: Row, rows: Sequence[Row], measured: str = MEASURED) -> Report:
    """Make the report from one row for each aligner, direction and site pair.

    Args:
        meta: what holds for all rows.
        rows: the rows.
        measured: on what, in words.
    """
    shown = with_short_names(rows)
    tables = {"fvu": f"FVU {measured}", **FAR, "fvu_unseen": UNSEEN, "top1_all": RETRIEVED}
    known = [_table(shown, name, on) for name, on in tables.items() if is_known(shown, name)]
    figures = {"fvu": partial(fvu_figure, _few_panels(shown))} if is_known(shown, "fvu") else {}
    findings = [
        *beside_far_rows(rows),
        *no_better_than_the_mean(rows),
        *retrieval(shown),
        *what_did_not_train(shown),
    ]
    return Report(
        "summary",
        meta,
        rows,
        figures=figures,
        screen=known,
        lead=lead(shown, measured),
        sentences=findings,
    )


def lead(rows: Sequence[Row], on: str) -> str:
    """Say what was fitted, and which map of the table is closest, trained or not.

    Args:
        rows: of the report, with short names of models.
        on: what they were measured on, in words.
    """
    maps = where(rows, role="method")
    places = len(distinct(maps, "site_x", "site_y"))
    sites = f"{places} site{'s' if places != 1 else ''}"
    said = [f"Maps {_route(rows)} were fitted at {sites} and measured {on}.", _closeness(maps)]
    if "validation" in on:
        advice = "These texts also chose the best step of each trained map: `evaluate.py inject` measures it on others."
        said.append(advice)
    return " ".join(said)


def _closeness(maps: Sequence[Row]) -> str:
    """The closest map and, where that was not trained everywhere, the closest that was, beside linear."""
    lines = known_lines(maps, "fvu")
    best = closest(lines, "fvu")
    if best is None:
        return "None of them has a finite error at every site, so none is said to be closest."
    line, whole = lines[best], " of the target's variance unexplained (FVU)"
    parts = [f"The closest, {with_training(best, line)}, {unexplained(line, of=whole)}"]
    further = closest(trained(lines), "fvu")
    if further not in (best, "linear", None):
        parts.append(
            f"the closest that was trained at every site, {further}, {_span(lines[further])}"
        )
    if best != "linear" and "linear" in lines:
        parts.append(beside("linear", lines, best))
    if all_known(line, "fvu_unseen"):
        name = "" if len(parts) == 1 else f"{best} "
        parts.append(f"and {name}{_span(line, 'fvu_unseen')} on types that no map was fitted on")
    return f"{', '.join(parts)}; always giving the mean would leave 100%."


def _span(line: Sequence[Row], column: str = "fvu") -> str:
    return share_range([row[column] for row in line])


def _route(rows: Sequence[Row]) -> str:
    """`from x to y`, or between them both ways, or of how many pairs."""
    pairs = distinct(rows, "model_x", "model_y")
    if len(pairs) == 1:
        return f"from {pairs[0][0]} to {pairs[0][1]}"
    if len(pairs) == 2 and pairs[0] == pairs[1][::-1]:
        return f"between {pairs[0][0]} and {pairs[0][1]}, both ways,"
    return f"of {len(pairs)} pairs of models"


def _few_panels(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows to draw: of more than a dozen pairs of models their medians, as one pair."""
    pairs = distinct(rows, "model_x", "model_y")
    if len(pairs) <= MOST_PAIRS:
        return rows
    ends = {"model_x": "X", "model_y": f"Y, median of {len(pairs)} pairs"}
    medians = []
    for group in grouped(rows, "method", "direction", "site_x", "site_y").values():
        known = {
            name: [row[name] for row in group if row.get(name) is not None] for name in MEDIANS
        }
        medians.append(
            worst_of(group)
            | ends
            | {name: median(each) if each else None for name, each in known.items()}
        )
    return medians


def _table(rows: Sequence[Row], column: str, said: str) -> SiteTable:
    """Make a table with aligners down and sites across; a star marks a map that training did not improve."""
    pairs = grouped(rows, "model_x", "model_y").values()
    lines = {
        key: line
        for pair in pairs
        for key, line in grouped(pair, "model_x", "model_y", "method").items()
    }
    sites = [site_name((row["site_x"], row["site_y"])) for row in next(iter(lines.values()))]
    table = SiteTable(f"{said}, by site pair", ["models", "fit", "aligner"], [], {"": sites})
    for (x, y, method), line in lines.items():
        cells = (mark(aligned(row[column]), row) for row in line)
        table.add_row(f"{x} → {y}", line[0].get("fit") or "", method, *cells)
    return table
