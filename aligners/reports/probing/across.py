"""The report of probes across a map: what Y's probes read in g(X), and what Y makes of what they read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from aligners.fitting.outcomes import mark, trained_methods, what_did_not_train
from aligners.probing.across.twin import PRINCIPAL, RANDOM, WHOLE
from aligners.reports.drawing import MODEL_COLOURS, Look, SitePanel, line_look, method_looks, number, site_figure
from aligners.reports.names import site_name, with_short_names
from aligners.reports.probing.limits import unfinished_in_words
from aligners.reports.report import Report, Row
from aligners.reports.screen import TitledTable, site_table

__all__ = ["report"]

NATIVE: dict[str, Look] = {
    "native_y": {**line_look(0, 7, "-", MODEL_COLOURS), "markersize": 3.5},
    "native_x": {**line_look(1, 6, "--", MODEL_COLOURS), "markersize": 3.5},
}
SAID = {"native_y": "{y}, its own", "native_x": "{x}, its own probe"}
ERASED, BASELINE = "mean", "baseline"
Pair = tuple[int, int]


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
    return Report(
        "probes_across",
        meta,
        rows,
        tables={"twin": twin},
        figures=figures,
        screen=[_table(shown), *([_twin_table(swaps)] if twin else [])],
        note="Kept: what Y's probe reads in g(X), above states that are all equal, as a share of what it reads in Y's "
        "own; mean over the sites where Y's own probe beats those, and the baseline: the most frequent label, or a "
        "chain of the words in their order.",
        sentences=[
            *_kept_in_words(shown),
            *_twin_in_words(swaps),
            *unfinished_in_words(meta),
            *_left_out(meta),
            *what_did_not_train(shown),
        ],
    )


def _of(rows: Sequence[Row], **wanted: object) -> list[Row]:
    return [row for row in rows if all(row[column] == value for column, value in wanted.items())]


def _each(rows: Sequence[Row], *columns: str) -> list[tuple[Any, ...]]:
    """The values of some columns that occur together, in order."""
    return list(dict.fromkeys(tuple(row[column] for column in columns) for row in rows))


def _pairs(rows: Sequence[Row]) -> list[Pair]:
    return [(i, j) for i, j in dict.fromkeys((row["site_x"], row["site_y"]) for row in rows)]


def _said(method: str, rows: Sequence[Row]) -> str:
    return SAID.get(method, "{method}").format(x=rows[0]["model_x"], y=rows[0]["model_y"], method=method)


def _mean(rows: Sequence[Row], column: str) -> float:
    values = [number(row[column]) for row in rows]
    return float(np.nanmean(values)) if not np.isnan(values).all() else float("nan")


def _percent(value: float) -> str:
    return "" if np.isnan(value) else f"{100 * value:.1f}"


def _title(rows: Sequence[Row]) -> str:
    return f"{rows[0]['model_x']} → {rows[0]['model_y']}"


# ---------------------------------------------------------------------- tables


def _table(rows: Sequence[Row]) -> TitledTable:
    """Make a table of scores: what is read down, sites across."""
    title = f"{_title(rows)}: what probes of {rows[0]['model_y']} read, held-out sentences, in hundredths"
    table = site_table(title, ["task", "read in"], ["kept"], {"": [site_name(pair) for pair in _pairs(rows)]})
    for task, measure, method in _each(rows, "task", "measure", "method"):
        own = _of(rows, task=task, measure=measure, method=method)
        kept = "" if own[0]["role"] != "method" else _percent(_mean(own, "kept"))
        style = {"ceiling": "green", "floor": "dim"}.get(own[0]["role"])
        cells = [mark(_percent(number(row["score"])), row) for row in own]
        table.add_row(f"{task}, {measure}", _said(method, rows), kept, *cells, style=style)
    return table


def _twin_table(rows: Sequence[Row]) -> TitledTable:
    """Make a table of penalties: what was swapped down, sites across."""
    title = f"{_title(rows)}: penalty of swapping a part of the state, nats"
    sites = {"": [site_name(pair) for pair in _pairs(rows)]}
    table = site_table(title, ["for", "what a probe reads, or other dimensions"], ["dimensions"], sites)
    for method, part, dimensions in _each(rows, "method", "part", "dimensions"):
        own = _of(rows, method=method, part=part, dimensions=dimensions)
        cells = ["" if row["penalty"] is None else mark(f"{row['penalty']:z.3f}", row) for row in own]
        table.add_row(method, part, str(dimensions), *cells)
    return table


# ---------------------------------------------------------------------- figures


def _figure(rows: Sequence[Row]) -> Figure:
    """Draw scores by site, a panel for each task and measure."""
    looks = {**NATIVE, **method_looks([name for (name,) in _each(rows, "method") if name not in (*NATIVE, BASELINE)])}
    looks[BASELINE] = {"color": "0.6", "linestyle": ":", "zorder": 0}
    shown = []
    for task, measure in _each(rows, "task", "measure"):
        own = _of(rows, task=task, measure=measure)
        lines = [(_said(name, rows), look, _of(own, method=name)) for name, look in looks.items()]
        shown.append(SitePanel(f"{task}, {measure}", _pairs(rows), lines))
    return site_figure(shown, "score", f"what probes of {rows[0]['model_y']} read", note=_title(rows))


def _twin_figure(rows: Sequence[Row]) -> Figure:
    """Draw penalties by site, a panel for each map, a line for each part of the state."""
    parts = _each(rows, "part", "dimensions")
    looks = {part: line_look(place, place, "-", MODEL_COLOURS) for place, part in enumerate(parts)}
    greys = {RANDOM: "0.65", PRINCIPAL: "0.4", WHOLE: "0"}
    for part in parts:
        if part[0] in greys:
            looks[part] = {**looks[part], "color": greys[part[0]], "linestyle": ":"}
    shown = []
    for (method,) in _each(rows, "method"):
        lines = [
            (f"{name} ({k})", look, _of(rows, method=method, part=name, dimensions=k))
            for (name, k), look in looks.items()
        ]
        title = "erased: the mean" if method == ERASED else f"{method}: g(X)"
        shown.append(SitePanel(title, _pairs(rows), lines))
    note = f"{_title(rows)}\nwhat a probe reads, or other dimensions (how many)"
    return site_figure(shown, "penalty", "penalty of the swap, nats", note=note)


# ---------------------------------------------------------------------- sentences


def _kept_in_words(rows: Sequence[Row]) -> list[str]:
    """Say of each measure what Y's probe reads in its own states, in those of the best map, and what X's probe does."""
    said = []
    for task, measure in _each(rows, "task", "measure"):
        own = _of(rows, task=task, measure=measure)
        native, other = (_mean(_of(own, method=name), "score") for name in NATIVE)
        maps = {name: _of(own, method=name) for name in trained_methods(_of(own, role="method"))}
        if maps:
            best = max(maps, key=lambda name: number(_mean(maps[name], "score")))
            score, kept = (_mean(maps[best], column) for column in ("score", "kept"))
            share = "" if np.isnan(kept) else f" ({_percent(kept)} % kept)"
            said.append(
                f"{task}, {measure}, mean over sites: {_percent(native)} in {_said('native_y', rows)} states, "
                f"{_percent(score)} through {best}{share}; {rows[0]['model_x']} under its own probe {_percent(other)}."
            )
        low = [row for row in _of(own, method="native_y") if row["kept"] is None]
        if low:
            places = ", ".join(f"{site_name((row['site_x'], row['site_y']))} ({_percent(row['score'])})" for row in low)
            least = _percent(_mean(_of(own, method=BASELINE), "score"))
            said.append(
                f"{task}, {measure}: in its own states the probe of {rows[0]['model_y']} is no better than the "
                f"baseline ({least}) or equal states at {places}: of that no share can be kept."
            )
    return said


def _twin_in_words(rows: Sequence[Row]) -> list[str]:
    """Say of each probed part whether Y uses it, beside other dimensions, and whether a map restores it."""
    said = []
    erased = _of(rows, method=ERASED)
    for part, k in _each(rows, "part", "dimensions"):
        if part in (RANDOM, PRINCIPAL, WHOLE):
            continue
        own = _of(rows, part=part)
        maps = {name: _mean(_of(own, method=name), "penalty") for name in trained_methods(own)}
        best = min((name for name in maps if name != ERASED), key=lambda name: number(maps[name]), default=None)
        through = "" if best is None else f"; with g(X) there, at best {maps[best]:z.3f} ({best})"
        others = [
            _mean(_of(erased, part=name, **same), "penalty")
            for name, same in ((RANDOM, {"dimensions": k}), (PRINCIPAL, {"dimensions": k}), (WHOLE, {}))
        ]
        said.append(
            f"Erasing what the {part} probe reads, {k} dimensions, costs {maps[ERASED]:z.3f} nats, mean over sites; "
            "random dimensions {:z.3f}, principal ones {:z.3f}, the whole state {:z.3f}{}.".format(*others, through)
        )
    return said


def _left_out(meta: Row) -> list[str]:
    why = meta.get("not_swapped")
    refused = [f"Left out, {name}: {reason}" for name, reason in meta.get("refusals", {}).items()]
    return [*([f"Nothing was swapped: {why}."] if why else []), *refused]
