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
from aligners.reports.names import (
    aligned,
    counted,
    models_in_words,
    route_name,
    site_of,
    with_short_names,
)
from aligners.reports.report import (
    Report,
    Row,
    all_known,
    distinct,
    grouped,
    is_known,
    known,
    values,
    where,
)
from aligners.reports.runs.injection_report import fvu_figure, retrieval
from aligners.reports.screen import SiteTable

MOST_PAIRS = 12  # of models with a panel each
MEASURED = "on the validation texts"
TABLES = {  # column -> title of its table
    "fvu": "FVU",
    "fvu_with_far": "FVU with the rows far from all others",
    "fvu_without_far": "FVU without them",
    "fvu_unseen": "FVU on their rows of types that were left out of fitting",
    "top1_all": "top 1 of all, share of mapped rows whose partner is the nearest of the target's",
}


def report(meta: Row, rows: Sequence[Row], measured: str = MEASURED) -> Report:
    """Make the report from one row for each aligner, direction and site pair.

    Args:
        meta: what holds for all rows.
        rows: the rows.
        measured: on what, in words.
    """
    shown = with_short_names(rows)
    screen = []
    for column, title in TABLES.items():
        if is_known(shown, column):
            about = f"{title} {measured}" if column == "fvu" else title
            screen.append(_table(shown, column, about))
    findings = beside_far_rows(rows) + no_better_than_the_mean(rows)
    return Report(
        "summary",
        meta,
        rows,
        figures={"fvu": partial(fvu_figure, _few_panels(shown))}
        if is_known(rows, "fvu")
        else {},
        screen=screen,
        lead=lead(shown, measured),
        sentences=findings + retrieval(shown) + what_did_not_train(shown),
    )


def lead(rows: Sequence[Row], on: str) -> str:
    """Say what was fitted, and which map of the table is closest, trained or not.

    Args:
        rows: rows of the report, with short names of models.
        on: what they were measured on, in words.
    """
    maps = where(rows, role="method")
    sites = counted(len(distinct(maps, "site_x", "site_y")), "site")
    said = f"Maps {models_in_words(rows)} were fitted at {sites} and measured {on}. {_closeness(maps)}"
    if "validation" in on:
        said += " These texts also chose the best step of each trained map: `evaluate.py inject` measures it on others."
    return said


def _closeness(maps: Sequence[Row]) -> str:
    """Name the closest map and, if it was not trained everywhere, the closest that was, compared with linear."""
    lines = known_lines(maps, "fvu")
    best = closest(lines, "fvu")
    if best is None:
        return "None of them has a finite error at every site, so none is said to be closest."
    line = lines[best]
    left = unexplained(line, of=" of the target's variance unexplained (FVU)")
    said = f"The closest, {with_training(best, line)}, {left}"
    name = ""
    further = closest(trained(lines), "fvu")
    if further not in (best, "linear", None):
        share = share_range(lines[str(further)])
        said += f", the closest that was trained at every site, {further}, {share}"
        name = f"{best} "
    if best != "linear" and "linear" in lines:
        said += f", {beside('linear', lines, best)}"
        name = f"{best} "
    if all_known(line, "fvu_unseen"):
        said += f", and {name}{share_range(line, 'fvu_unseen')} on types that no map was fitted on"
    return f"{said}; always giving the mean would leave 100%."


def _few_panels(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows to draw: for more than a dozen pairs of models, their medians as one pair."""
    pairs = distinct(rows, "model_x", "model_y")
    if len(pairs) <= MOST_PAIRS:
        return rows
    medians = []
    for group in grouped(rows, "method", "direction", "site_x", "site_y").values():
        row = worst_of(group)
        row |= {"model_x": "X", "model_y": f"Y, median of {len(pairs)} pairs"}
        for column in ("fvu", "fvu_unseen"):
            found = values(known(group, column), column)
            row[column] = median(found) if found else None
        medians.append(row)
    return medians


def _table(rows: Sequence[Row], column: str, title: str) -> SiteTable:
    """Make a table with aligners down and sites across; a star marks a map that training did not improve."""
    lines: list[list[Row]] = []
    for pair in grouped(rows, "model_x", "model_y").values():
        lines += grouped(pair, "method").values()
    names = ["models", "fit", "aligner"]
    table = SiteTable(f"{title}, by site pair", names, [], {"": map(site_of, lines[0])})
    for line in lines:
        first = line[0]
        cells = [mark(aligned(row[column]), row) for row in line]
        table.add_row(
            route_name(first), first.get("fit") or "", first["method"], *cells
        )
    return table
