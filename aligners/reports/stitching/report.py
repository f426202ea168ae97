"""The report of stitching: penalties and scores by route, method and site pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from matplotlib.figure import Figure
from rich.table import Table

from aligners.fitting.outcomes import mark, what_did_not_train
from aligners.injection.scoring.pair_intervals import over_pairs
from aligners.reports.names import site_name, with_short_names
from aligners.reports.report import Report, Row
from aligners.reports.screen import site_table
from aligners.reports.stitching.figures import accuracy_figure, curve_figure, penalty_figure, penalty_map
from aligners.reports.stitching.lines import (
    Line,
    averaged,
    is_grid,
    lines_of,
    matching_pairs,
    methods_of,
    what_intervals_are,
)
from aligners.reports.stitching.words import findings
from aligners.reports.words import score_heading

__all__ = ["report", "stitching_tables"]

Groups = Mapping[str, Sequence[str]] | None
MOST_SITES_TOGETHER = 3  # penalty and accuracy side by side
LOST = "lost × 100"  # of the score, if lines are means over routes
MOST_SITES_ABREAST = {"penalty": 6, "score": 12}  # either alone
MARKDOWN_COLUMNS = {
    "model_x": "from", "model_y": "into", "site_x": "site", "method": "method", "loss": "loss", "penalty": "penalty",
    "penalty_low": "low", "penalty_high": "high", "accuracy": "accuracy", "score_name": "score", "score": "value",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte", "agreement": "agreement", "fvu": "FVU",
}  # fmt: skip


def report(meta: Row, rows: Sequence[Row], curves: Sequence[Row] = (), groups: Groups = None) -> Report:
    """Make the report from rows and learning curves.

    Args:
        meta: what holds for all rows.
        rows: one for each route, method and site pair, and one "native" for each route.
        curves: one for each route, method, site pair and step.
        groups: of models. With groups, or many models, means over pairs of models are shown.
    """
    return Report(
        "stitching",
        meta,
        rows,
        tables={"pairs": over_pairs(rows, groups) if averaged(rows, groups) else [], "curves": curves},
        columns=MARKDOWN_COLUMNS,
        figures=_figures(rows, curves, groups),
        screen=stitching_tables(rows, groups),
        note=f"±: half of the {what_intervals_are(rows, groups)}",
        sentences=[*findings(rows, groups), *what_did_not_train(with_short_names(rows))],
    )


def _figures(rows: Sequence[Row], curves: Sequence[Row], groups: Groups) -> dict[str, Callable[[], Figure]]:
    figures: dict[str, Callable[[], Figure]] = {
        "penalty": partial(penalty_figure, rows, groups),
        "accuracy": partial(accuracy_figure, rows, groups),
    }
    if is_grid(rows):
        figures["map"] = partial(penalty_map, rows, groups)
    trained = list(dict.fromkeys(point["method"] for point in curves))
    for method in trained:
        own = [point for point in curves if point["method"] == method]
        figures["curves" if len(trained) == 1 else f"curves_{method}"] = partial(curve_figure, own, groups)
    return figures


def stitching_tables(rows: Sequence[Row], groups: Groups = None) -> list[Table]:
    """Make tables with routes down and sites across: the penalty ± half its interval's width, and the task's score.

    With groups, or many models, a line is the mean over a group's routes and shows how much of the score is lost. Many
    sites are spread over several tables; of a grid, only the matching sites are shown.
    """
    pairs, lines = matching_pairs(rows), lines_of(rows, groups)
    mean = averaged(rows, groups)
    units = {"penalty": "penalty", "score": LOST if mean else score_heading(rows)}
    blocks = [(list(units.values()), pairs)]
    if len(pairs) > MOST_SITES_TOGETHER:
        blocks = [
            ([units[name]], pairs[start : start + most])
            for name, most in MOST_SITES_ABREAST.items()
            for start in range(0, len(pairs), most)
        ]
    tables = []
    for method in methods_of(rows):
        about = next(row for row in rows if row["method"] == method)
        title = method + (f", {about['fit']}" if about["fit"] not in (None, "none") else "")
        title += f", {about['parameters']:,} parameters a site" if about["parameters"] else ""
        title += ", matching sites" if is_grid(rows) else ""
        tables += [_table(lines, method, shown, title, columns) for columns, shown in blocks]
    return tables


def _table(
    lines: Sequence[Line], method: str, pairs: Sequence[tuple[int, int]], title: str, columns: Sequence[str]
) -> Table:
    whole = next((column for column in columns if column not in ("penalty", LOST)), None)
    sites = [site_name(pair) for pair in pairs]
    across = {f"{column}, nats" if column == "penalty" else column: sites for column in columns}
    table = site_table(title, ["from → into"], [] if whole is None else [f"native\n{whole}"], across)
    for line in lines:
        cells = {(row["site_x"], row["site_y"]): row for row in line.rows if row["method"] == method}
        if not cells:
            continue
        native = [f"{100 * row['score']:.1f}" for row in line.rows if row["method"] == "native"]
        texts = [_cell(cells.get(pair), column) for column in columns for pair in pairs]
        table.add_row(line.name, *(native if whole is not None else []), *texts, style="dim" if line.same else None)
    return table


def _cell(row: Row | None, column: str) -> str:
    if row is None:
        return ""
    if column == "penalty":
        if row["penalty"] is None:
            return "overflow"
        digits = 3 if abs(row["penalty"]) < 1 else 2
        half = (row["penalty_high"] - row["penalty_low"]) / 2
        return mark(f"{row['penalty']:z.{digits}f}", row) + f" ±{half:.{digits}f}"
    value = row["score_penalty" if column == LOST else "score"]
    return "" if value is None else mark(f"{100 * value:z.1f}", row)
