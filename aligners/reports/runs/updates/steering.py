"""The report of steering: effect against cost, effects at equal cost, and generated text."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from aligners.reports import drawing
from aligners.reports.names import WORDS, aligned, with_short_names
from aligners.reports.report import Report, Row, distinct, grouped, is_known
from aligners.reports.runs.updates.generated import generation_tables
from aligners.reports.screen import ROLE_STYLES, SiteTable
from aligners.reports.templates import sentences

PANEL = (3.4, 2.8)
STYLES = {"native": "-", "carried": "--"}


def report(
    meta: Row, rows: Sequence[Row], equal: Sequence[Row], generation: Sequence[Row] = (), samples: Sequence[Row] = ()
) -> Report:
    """Make the report.

    Args:
        meta: what holds for all rows.
        rows: one for each direction and α.
        equal: one for each effect, cost and direction; random ones together.
        generation: one for each direction whose generated text was measured.
        samples: some of these texts.
    """
    shown = with_short_names(rows)
    effects = [name for name in WORDS["steering"] if is_known(rows, name)]
    screen = [_table(effect, line) for effect, line in grouped(equal, "effect").items()]
    return Report(
        "steering", meta, rows, {"equal": equal, "generation": generation, "samples": samples},
        figures={"steering": partial(figure, shown, effects)},
        screen=[*screen, *generation_tables(generation, samples)],
        sentences=sentences("steering", rows=shown, equal=equal, generation=generation),
    )  # fmt: skip


def _table(effect: str, equal: Sequence[Row]) -> SiteTable:
    levels = distinct(equal, "kl")
    heads = [f"{level:g}" for level in levels]
    table = SiteTable(WORDS["steering"][effect], ["direction"], ["site"], {"at KL": heads, "% of native": heads})
    for (method, site), line in grouped(equal, "method", "site").items():
        cells = [aligned(row["value"]) for row in line]
        cells += [aligned(None if row["share"] is None else 100 * row["share"], 0) for row in line]
        table.add_row(method, str(site), *cells, style=ROLE_STYLES["floor"] if line[0]["role"] == "random" else None)
    return table


def figure(rows: Sequence[Row], effects: Sequence[str]) -> Figure:
    """Draw effect (up) against cost (across): a panel for each effect and site, a band for random directions."""
    panels = [(effect, site) for effect in effects for site in distinct(rows, "site")]
    across = len(panels) // len(effects)
    made, axes = drawing.panels(len(panels), across, PANEL, (1.6, 0.8))
    names = distinct([row for row in rows if row["role"] != "random"], "method")
    for axis, (effect, site) in zip(axes, panels, strict=True):
        here = grouped([row for row in rows if row["site"] == site and row["alpha"] > 0 and row["kl"]], "method")
        for name, line in here.items():
            if line[0]["role"] != "random":
                columns = ("kl", effect, f"{effect}_low", f"{effect}_high")
                costs, values, low, high = ([row[column] for row in line] for column in columns)
                number, role = names.index(name), line[0]["role"]
                look = drawing.line_look(number, number, STYLES[role])
                axis.plot(costs, values, label=name if role in name else f"{name} ({role})", **look)
                axis.fill_between(costs, low, high, color=look["color"], alpha=0.15, linewidth=0)
        drawn = [np.array([(row["kl"], row[effect]) for row in line]).T
                 for line in here.values() if line[0]["role"] == "random"]  # fmt: skip
        if drawn:
            grid = np.geomspace(max(line[0, 0] for line in drawn), min(line[0, -1] for line in drawn), 50)
            band = [np.interp(grid, *line) for line in drawn]
            axis.fill_between(grid, np.min(band, 0), np.max(band, 0), color="0.85", label="random", linewidth=0)
        axis.axhline(0, color="0.6", linewidth=0.8, zorder=0)
        axis.set_xscale("log")
        axis.set_title(f"site {site}", fontsize=9)
        axis.set_ylabel(WORDS["steering"][effect] if site == panels[0][1] else "")
    drawing.dress(made, axes, "cost: KL(own ‖ steered), nats a token", "")
    return made
