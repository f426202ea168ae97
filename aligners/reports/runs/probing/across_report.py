"""The report of probes across a map: what Y's probes read in g(X), and whether Y uses it."""

import math
from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure

from aligners.fitting.training_status import mark, what_did_not_train
from aligners.probing.across.twin import PRINCIPAL, RANDOM, WHOLE
from aligners.reports.closest import Lines, closest, known_lines, trained
from aligners.reports.drawing import (
    MODEL_COLOURS,
    Look,
    SitePanel,
    line_look,
    method_looks,
    site_figure,
)
from aligners.reports.names import (
    blank,
    fixed,
    route_name,
    site_names,
    site_of,
    with_short_names,
)
from aligners.reports.report import (
    Report,
    Row,
    distinct,
    grouped,
    mean,
    number,
    site_pairs,
    where,
)
from aligners.reports.runs.injection_report import left_out
from aligners.reports.runs.probing.probing_report import unfinished
from aligners.reports.screen import ROLE_STYLES, SiteTable

NATIVE = {
    "native_y": (0, 7, "-"),
    "native_x": (1, 6, "--"),
}  # the look of the models themselves
ERASED, BASELINE = "mean", "baseline"
GREYS = {
    RANDOM: "0.65",
    PRINCIPAL: "0.4",
    WHOLE: "0",
}  # of dimensions that no probe reads
MOST_SCORES = 2  # in the first sentences


def report(meta: Row, rows: Sequence[Row], twin: Sequence[Row] = ()) -> Report:
    """Make the report.

    Args:
        meta: what holds for all rows.
        rows: one for each task, measure, method and site pair.
        twin: one for each map, part of the state and site pair.
    """
    shown = with_short_names(rows)
    swaps = with_short_names(twin)
    figures = {"probes_across": partial(_figure, shown)}
    screen = [_table(shown)]
    read = _read(shown)
    findings = read[MOST_SCORES:] + _not_read(shown)
    if twin:
        figures["probes_twin"] = partial(_twin_figure, swaps)
        screen.append(_twin_table(swaps))
        findings += _swapped(swaps)
    findings += unfinished(meta)
    if meta.get("not_swapped"):
        findings.append(f"Nothing was swapped: {meta['not_swapped']}.")
    return Report(
        "probes_across",
        meta,
        rows,
        {"twin": twin},
        figures=figures,
        screen=screen,
        lead=lead(shown, read),
        sentences=findings + left_out(meta) + what_did_not_train(shown),
    )


# ---------------------------------------------------------------------- what is said


def lead(rows: Sequence[Row], read: Sequence[str]) -> str:
    """Say what was done, and what was read of the first tasks.

    Args:
        rows: rows of the report, with short names of models.
        read: the sentences of all tasks.
    """
    x = rows[0]["model_x"]
    y = rows[0]["model_y"]
    said = f"States of {x} were mapped into the space of {y}, and read there by probes that were trained on {y} alone."
    if not read:
        read = ["No map is trained at every site, so none is compared with another."]
    return " ".join([said, *read[:MOST_SCORES]])


def _best(panel: Sequence[Row]) -> str:
    """Return the trained map with the highest mean score over sites; empty if there is none."""
    best = ""
    highest = -math.inf
    for name, line in trained(grouped(where(panel, role="method"), "method")).items():
        score = mean(line, "score", known=True)
        if score > highest:
            best = name
            highest = score
    return best


def _score(panel: Sequence[Row], method: str, column: str = "score") -> str:
    """Return the mean of a method over sites, in hundredths; empty if it is unknown."""
    return _percent(mean(where(panel, method=method), column, known=True))


def _percent(value: float | None) -> str:
    return blank(100 * number(value), "z.1f")


def _read(rows: Sequence[Row]) -> list[str]:
    """Say what probes read of each task in the best map's states, in both models' own, and in the baseline."""
    x = rows[0]["model_x"]
    y = rows[0]["model_y"]
    said = []
    for (task, measure), panel in grouped(rows, "task", "measure").items():
        best = _best(panel)
        if not best:
            continue
        text = f"Of {task} they read {measure} {_score(panel, best)} in the states of the best map, {best}"
        kept = _score(panel, best, "kept")
        if kept:
            text += f" ({kept}% kept)"
        others = {
            "native_y": f"in {y}'s own",
            "native_x": f"in {x}'s, by its own probe",
            BASELINE: "is the baseline",
        }
        for method, words in others.items():
            score = _score(panel, method)
            if score:
                text += f", {score} {words}"
        said.append(f"{text}.")
    return said


def _not_read(rows: Sequence[Row]) -> list[str]:
    """Say where probes read nothing even in Y itself."""
    said = []
    for (task, measure), panel in grouped(rows, "task", "measure").items():
        sites = []
        for row in where(panel, method="native_y", kept=None):
            sites.append(f"{site_of(row)} ({_percent(row['score'])})")
        if sites:
            said.append(
                f"{task}, {measure}: on its own states the probe of {panel[0]['model_y']} is no better than the "
                f"baseline ({_score(panel, BASELINE)}) or on equal states at {', '.join(sites)}, where no share that "
                "is kept can be given."
            )
    return said


def _swapped(swaps: Sequence[Row]) -> list[str]:
    """Say what erasing each probed part costs, compared with other dimensions, and whether a map restores it."""
    said = []
    for part, k in distinct(swaps, "part", "dimensions"):
        if part in GREYS:
            continue
        erased = {
            part: where(swaps, method=ERASED, part=part),
            RANDOM: where(swaps, method=ERASED, part=RANDOM, dimensions=k),
            PRINCIPAL: where(swaps, method=ERASED, part=PRINCIPAL, dimensions=k),
            WHOLE: where(swaps, method=ERASED, part=WHOLE),
        }
        costs = {
            name: fixed(mean(rows, "penalty", known=True), ".3f")
            for name, rows in erased.items()
        }
        text = (
            f"Erasing what the {part} probe reads, {k} dimensions, costs {costs[part]} nats, mean over sites; random "
            f"dimensions {costs[RANDOM]}, principal ones {costs[PRINCIPAL]}, the whole state {costs[WHOLE]}"
        )
        lines = _restored(swaps, part)
        best = closest(lines, "penalty")
        if best is not None:
            text += f"; with g(X) there, at best {fixed(mean(lines[best], 'penalty'), '.3f')} ({best})"
        said.append(f"{text}.")
    return said


def _restored(swaps: Sequence[Row], part: str) -> Lines:
    """Return the trained maps whose states were put in place of a part."""
    lines = known_lines(where(swaps, part=part), "penalty")
    lines.pop(ERASED, None)
    return trained(lines)


# ---------------------------------------------------------------------- tables


def _table(rows: Sequence[Row]) -> SiteTable:
    """Make a table of scores: what is read down, sites across."""
    read = (
        f"what probes of {rows[0]['model_y']} read, held-out sentences, in hundredths"
    )
    title = f"{route_name(rows[0])}: {read}"
    sites = site_names(site_pairs(rows))
    table = SiteTable(title, ["task", "read in"], ["kept"], {"": sites})
    for (task, measure, method), line in grouped(
        rows, "task", "measure", "method"
    ).items():
        role = line[0]["role"]
        cells = [_score(line, method, "kept") if role == "method" else ""]
        cells += [mark(_percent(row["score"]), row) for row in line]
        table.add_row(f"{task}, {measure}", method, *cells, style=ROLE_STYLES.get(role))
    return table


def _twin_table(rows: Sequence[Row]) -> SiteTable:
    """Make a table of penalties: what was swapped down, sites across."""
    swapped = "penalty of swapping what a probe reads, or other dimensions, nats"
    title = f"{route_name(rows[0])}: {swapped}"
    sites = site_names(site_pairs(rows))
    table = SiteTable(title, ["map", "part"], ["dimensions"], {"": sites})
    for (method, part, k), line in grouped(
        rows, "method", "part", "dimensions"
    ).items():
        cells = []
        for row in line:
            cells.append(mark(blank(row["penalty"], "z.3f"), row))
        table.add_row(method, part, str(k), *cells)
    return table


# ---------------------------------------------------------------------- figures


def _figure(rows: Sequence[Row]) -> Figure:
    """Draw scores by site, a panel for each task and measure."""
    x = rows[0]["model_x"]
    y = rows[0]["model_y"]
    names = {"native_y": f"{y}, its own", "native_x": f"{x}, its own probe"}
    looks: dict[str, Look] = {}
    for name, (colour, marker, dashes) in NATIVE.items():
        looks[name] = line_look(colour, marker, dashes, MODEL_COLOURS) | {
            "markersize": 3.5
        }
    maps = [
        name for name in distinct(rows, "method") if name not in (*NATIVE, BASELINE)
    ]
    looks |= method_looks(maps)
    looks[BASELINE] = {"color": "0.6", "marker": "_", "linestyle": ":", "zorder": 0}
    shown = []
    for (task, measure), panel in grouped(rows, "task", "measure").items():
        lines = []
        for name, look in looks.items():
            lines.append((names.get(name, name), look, where(panel, method=name)))
        shown.append(SitePanel(f"{task}, {measure}", site_pairs(rows), lines))
    return site_figure(
        shown, "score", f"probes of {y}: score × 100", 100, note=route_name(rows[0])
    )


def _twin_figure(rows: Sequence[Row]) -> Figure:
    """Draw penalties by site, a panel for each map, a line for each part of the state."""
    looks: dict[tuple[str, int], Look] = {}
    for place, (part, k) in enumerate(distinct(rows, "part", "dimensions")):
        looks[part, k] = line_look(place, place, "-", MODEL_COLOURS)
        if part in GREYS:
            looks[part, k] |= {"color": GREYS[part], "linestyle": ":"}
    shown = []
    for method, panel in grouped(rows, "method").items():
        lines = []
        for (part, k), look in looks.items():
            lines.append((f"{part} ({k})", look, where(panel, part=part, dimensions=k)))
        title = "erased: the mean" if method == ERASED else f"{method}: g(X)"
        shown.append(SitePanel(title, site_pairs(rows), lines))
    note = f"{route_name(rows[0])}\nwhat a probe reads, or other dimensions (how many)"
    return site_figure(shown, "penalty", "penalty of the swap, nats", note=note)
