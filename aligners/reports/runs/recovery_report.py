"""The report of how well maps recover a known bijection."""

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure

from aligners.fitting.training_status import mark, what_did_not_train, worst_of
from aligners.reports.drawing import (
    HOLLOW,
    PANEL,
    dress,
    line_of_maps,
    log_scale,
    method_looks,
    panels,
)
from aligners.reports.names import with_short_names
from aligners.reports.report import Report, Row, grouped, mean
from aligners.reports.screen import SiteTable


def report(meta: Row, rows: Sequence[Row]) -> Report:
    """Make the report from one row for each map, strength, target and site."""
    end = {"backward": ", back to X"}
    shown = [
        row | {"method": row["method"] + end.get(str(row.get("direction")), "")}
        for row in with_short_names(rows)
    ]
    # over targets and sites, NaN where one of them is no number
    means = [
        worst_of(group) | {"fvu": mean(group, "fvu")}
        for group in grouped(shown, "method", "strength").values()
    ]
    figures, findings = {"recover": partial(_figure, means)}, what_did_not_train(shown)
    return Report(
        "recover", meta, rows, figures=figures, screen=[_table(means)], sentences=findings
    )


def _table(means: Sequence[Row]) -> SiteTable:
    title = (
        f"FVU on held-out rows of random INNs of {means[0]['model_x']}, mean over targets and sites"
    )
    strengths = [f"{strength:g}" for strength in grouped(means, "strength")]
    table = SiteTable(title, ["method"], [], {"strength": strengths})
    for name, line in grouped(means, "method").items():
        table.add_row(name, *(mark(f"{row['fvu']:.4f}", row) for row in line))
    return table


def _figure(means: Sequence[Row]) -> Figure:
    """Draw FVU against strength on logarithmic scales, a line for each method."""
    figure, (axis,) = panels(1, 1, PANEL, (1.9, 0.9))
    methods, untrained = grouped(means, "method"), False
    for name, look in method_looks(methods).items():
        places, heights = ([row[column] for row in methods[name]] for column in ("strength", "fvu"))
        untrained |= line_of_maps(axis, places, heights, methods[name], name, look)
    log_scale([axis])
    axis.set(
        ylabel="FVU: share of variance left unexplained",
        title=f"random INNs of {means[0]['model_x']}",
    )
    dress(figure, [axis], "strength of the non-linearity", "", HOLLOW if untrained else "")
    return figure
