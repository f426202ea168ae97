"""The report of probes across a map: what Y's probes read in g(X), and what Y makes of what they read."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from aligners.fitting.training_status import mark, what_did_not_train
from aligners.probing.across.twin import PRINCIPAL, RANDOM, WHOLE
from aligners.reports.drawing import (
    MODEL_COLOURS,
    Look,
    SitePanel,
    line_look,
    method_looks,
    site_figure,
)
from aligners.reports.names import site_name, with_short_names
from aligners.reports.report import Report, Row, distinct, grouped, mean, site_pairs, where
from aligners.reports.screen import ROLE_STYLES, SiteTable
from aligners.reports.templates import sentences

NATIVE = {"native_y": (0, 7, "-"), "native_x": (1, 6, "--")}  # the look of the models themselves
ERASED, BASELINE = "mean", "baseline"
GREYS = {RANDOM: "0.65", PRINCIPAL: "0.4", WHOLE: "0"}  # of dimensions that no probe reads


def report(meta: Row, rows: Sequence[Row], twin: Sequence[Row] = ()) -> Report:
    """Make the report.

    Args:
        meta: what holds for all rows.
        rows: one for each task, measure, method and site pair.
        twin: one for each map, part of the state and site pair.
    """
    shown, swaps = with_short_names(rows), with_short_names(twin)
    figures = {"probes_across": partial(_figure, shown)}
    if twin:
        figures["probes_twin"] = partial(_twin_figure, swaps)
    tables = [_table(shown), *([_twin_table(swaps)] if twin else [])]
    findings = sentences("probes_across", meta=meta, rows=shown, swaps=swaps)
    findings += what_did_not_train(shown)
    return Report(
        "probes_across",
        meta,
        rows,
        {"twin": twin},
        figures=figures,
        screen=tables,
        sentences=findings,
    )


def _name(method: str, rows: Sequence[Row]) -> str:
    names = {
        "native_y": f"{rows[0]['model_y']}, its own",
        "native_x": f"{rows[0]['model_x']}, its own probe",
    }
    return names.get(method, method)


def _percent(value: float | None) -> str:
    return "" if value is None or np.isnan(value) else f"{100 * value:.1f}"


def _title(rows: Sequence[Row]) -> str:
    return f"{rows[0]['model_x']} → {rows[0]['model_y']}"


# ---------------------------------------------------------------------- tables


def _table(rows: Sequence[Row]) -> SiteTable:
    """Make a table of scores: what is read down, sites across."""
    title = f"{_title(rows)}: what probes of {rows[0]['model_y']} read, held-out sentences, in hundredths"
    table = SiteTable(
        title, ["task", "read in"], ["kept"], {"": [site_name(pair) for pair in site_pairs(rows)]}
    )
    for (task, measure, method), line in grouped(rows, "task", "measure", "method").items():
        role = line[0]["role"]
        share = _percent(mean(line, "kept", known=True)) if role == "method" else ""
        cells = [mark(_percent(row["score"]), row) for row in line]
        table.add_row(f"{task}, {measure}", method, share, *cells, style=ROLE_STYLES.get(role))
    return table


def _twin_table(rows: Sequence[Row]) -> SiteTable:
    """Make a table of penalties: what was swapped down, sites across."""
    title = f"{_title(rows)}: penalty of swapping what a probe reads, or other dimensions, nats"
    table = SiteTable(
        title, ["map", "part"], ["dimensions"], {"": [site_name(pair) for pair in site_pairs(rows)]}
    )
    for (method, part, dimensions), line in grouped(rows, "method", "part", "dimensions").items():
        cells = [
            "" if row["penalty"] is None else mark(f"{row['penalty']:z.3f}", row) for row in line
        ]
        table.add_row(method, part, str(dimensions), *cells)
    return table


# ---------------------------------------------------------------------- figures


def _figure(rows: Sequence[Row]) -> Figure:
    """Draw scores by site, a panel for each task and measure."""
    looks = {
        name: line_look(*look, MODEL_COLOURS) | {"markersize": 3.5} for name, look in NATIVE.items()
    }
    looks |= method_looks(
        [name for name in distinct(rows, "method") if name not in (*NATIVE, BASELINE)]
    )
    looks[BASELINE] = {"color": "0.6", "marker": "_", "linestyle": ":", "zorder": 0}
    shown = []
    for (task, measure), panel in grouped(rows, "task", "measure").items():
        lines = [
            (_name(name, rows), look, where(panel, method=name)) for name, look in looks.items()
        ]
        shown.append(SitePanel(f"{task}, {measure}", site_pairs(rows), lines))
    return site_figure(
        shown, "score", f"probes of {rows[0]['model_y']}: score × 100", 100, note=_title(rows)
    )


def _twin_figure(rows: Sequence[Row]) -> Figure:
    """Draw penalties by site, a panel for each map, a line for each part of the state."""
    looks: dict[tuple[str, int], Look] = {}
    for place, part in enumerate(distinct(rows, "part", "dimensions")):
        grey = {"color": GREYS[part[0]], "linestyle": ":"} if part[0] in GREYS else {}
        looks[part] = line_look(place, place, "-", MODEL_COLOURS) | grey
    shown = []
    for method, panel in grouped(rows, "method").items():
        lines = [
            (f"{name} ({k})", look, where(panel, part=name, dimensions=k))
            for (name, k), look in looks.items()
        ]
        title = "erased: the mean" if method == ERASED else f"{method}: g(X)"
        shown.append(SitePanel(title, site_pairs(rows), lines))
    note = f"{_title(rows)}\nwhat a probe reads, or other dimensions (how many)"
    return site_figure(shown, "penalty", "penalty of the swap, nats", note=note)
