"""The report of how well maps recover a known bijection."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from aligners.fitting.outcomes import mark, trained_methods, what_did_not_train, worst_of
from aligners.reports.drawing import HOLLOW, PANEL, dress, hollow_where_untrained, log_scale, method_looks, panels
from aligners.reports.names import with_short_names
from aligners.reports.report import Report, Row, grouped, mean, where


def report(meta: Row, rows: Sequence[Row]) -> Report:
    """Make the report from one row for each map, strength, target and site."""
    shown = with_short_names(rows)
    figures, said = {"recover": partial(_figure, shown)}, [_closest(shown), *what_did_not_train(shown)]
    return Report("recover", meta, rows, figures=figures, screen=[_table(shown)], sentences=said)


def _means(rows: Sequence[Row]) -> dict[str, dict[float, float]]:
    """Method -> strength -> the mean FVU over targets and sites; NaN where one of them is no number."""
    means: dict[str, dict[float, float]] = {}
    for (method, strength), own in grouped(rows, "method", "strength").items():
        means.setdefault(method, {})[strength] = mean(own, "fvu")
    return means


def _worst(rows: Sequence[Row], method: str) -> list[Row]:
    """A row of a method at each strength: one that is not trained, if there is any."""
    return [worst_of(own) for own in grouped(where(rows, method=method), "strength").values()]


def _table(rows: Sequence[Row]) -> Table:
    means = _means(rows)
    table = Table(title=f"FVU on held-out rows of random INNs of {rows[0]['model_x']}, mean over targets and sites")
    table.add_column("method")
    for strength in next(iter(means.values())):
        table.add_column(f"strength {strength:g}", justify="right")
    for name, values in means.items():
        cells = zip(values.values(), _worst(rows, name), strict=True)
        table.add_row(name, *(mark(f"{value:.4f}", row) for value, row in cells))
    return table


def _figure(rows: Sequence[Row]) -> Figure:
    """Draw FVU against strength on logarithmic scales, a line for each method."""
    figure, (axis,) = panels(1, 1, PANEL, (1.9, 0.9))
    means = _means(rows)
    looks, untrained = method_looks(means), False
    for name, values in means.items():
        places, heights = list(values), list(values.values())
        axis.plot(places, heights, label=name, **looks[name])
        untrained |= hollow_where_untrained(axis, places, heights, _worst(rows, name), looks[name])
    log_scale([axis])
    axis.set_ylabel("FVU: share of variance left unexplained")
    axis.set_title(f"random INNs of {rows[0]['model_x']}")
    dress(figure, [axis], "strength of the non-linearity", "", HOLLOW if untrained else "")
    return figure


def _closest(rows: Sequence[Row]) -> str:
    trained = set(trained_methods(rows))
    means = _means([row for row in rows if row["method"] in trained])
    if not means:
        return "No map was trained at every site."
    strengths = list(next(iter(means.values())))
    best = {at: min(means, key=lambda name: np.nan_to_num(means[name][at], nan=np.inf)) for at in strengths}
    said = "; ".join(f"at strength {at:g} {name} leaves {100 * means[name][at]:.2g} %" for at, name in best.items())
    return f"Closest to the target, of its variance: {said}."
