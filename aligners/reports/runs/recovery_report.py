"""The report of how well maps recover a known bijection."""

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure

from aligners.fitting.training_status import mark, what_did_not_train, worst_of
from aligners.reports.closest import closest, known_lines, with_training
from aligners.reports.drawing import (
    HOLLOW,
    PANEL,
    dress,
    line_of_maps,
    log_scale,
    method_looks,
    panels,
)
from aligners.reports.names import plain_number, with_short_names
from aligners.reports.report import Report, Row, distinct, grouped, mean, values, where
from aligners.reports.screen import SiteTable


def report(meta: Row, rows: Sequence[Row]) -> Report:
    """Make the report from one row for each map, strength, target and site."""
    shown = with_short_names(rows)
    first = lead(shown)
    for row in shown:
        if row.get("direction") == "backward":
            row["method"] += ", back to X"
    means = []  # over targets and sites, NaN where one of them is no number
    for group in grouped(shown, "method", "strength").values():
        means.append(worst_of(group) | {"fvu": mean(group, "fvu")})
    return Report(
        "recover",
        meta,
        rows,
        figures={"recover": partial(_figure, means)},
        screen=[_table(means)],
        lead=first,
        sentences=what_did_not_train(shown),
    )


def lead(rows: Sequence[Row]) -> str:
    """Say what the closest map leaves at the least and at the greatest non-linearity, beside linear.

    Args:
        rows: rows of the report, with short names of models.
    """
    said = f"The targets are random invertible networks of the states of {rows[0]['model_x']}, so an exact map exists."
    forward = next(iter(grouped(rows, "direction").values()))
    strengths = distinct(forward, "strength")
    ends = {strengths[-1]: "greatest", strengths[0]: "least"}
    parts = []
    for strength in dict.fromkeys((strengths[0], strengths[-1])):
        lines = known_lines(where(forward, strength=strength), "fvu")
        best = closest(lines, "fvu")
        if best is None:
            continue
        named = with_training(best, lines[best])
        text = (
            f"At the {ends[strength]} non-linearity (strength {strength:g}) the closest map, {named}, leaves "
            f"{_share(lines[best])} of the variance of held-out rows unexplained (FVU)"
        )
        if best != "linear" and "linear" in lines:
            text += f", linear {_share(lines['linear'])}"
        parts.append(f"{text}.")
    if not parts:
        parts = [
            "No map has a finite error at every site, so none is said to be closest."
        ]
    return " ".join([said, *parts])


def _share(line: Sequence[Row]) -> str:
    left = mean(line, "fvu")
    if left < 0.001:
        return "less than 0.1%"
    return f"{plain_number(100 * left, 2)}%"


def _table(means: Sequence[Row]) -> SiteTable:
    model = means[0]["model_x"]
    title = (
        f"FVU on held-out rows of random INNs of {model}, mean over targets and sites"
    )
    strengths = [f"{strength:g}" for strength in distinct(means, "strength")]
    table = SiteTable(title, ["method"], [], {"strength": strengths})
    for name, line in grouped(means, "method").items():
        table.add_row(name, *(mark(f"{row['fvu']:.4f}", row) for row in line))
    return table


def _figure(means: Sequence[Row]) -> Figure:
    """Draw FVU against strength on logarithmic scales, a line for each method."""
    figure, (axis,) = panels(1, 1, PANEL, (1.9, 0.9))
    methods = grouped(means, "method")
    untrained = False
    for name, look in method_looks(methods).items():
        line = methods[name]
        across = values(line, "strength")
        up = values(line, "fvu")
        untrained |= line_of_maps(axis, across, up, line, name, look)
    log_scale([axis])
    axis.set_ylabel("FVU: share of variance left unexplained")
    axis.set_title(f"random INNs of {means[0]['model_x']}")
    dress(
        figure, [axis], "strength of the non-linearity", "", HOLLOW if untrained else ""
    )
    return figure
