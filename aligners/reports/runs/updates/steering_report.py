"""The report of steering: effect against cost, effects at equal cost, and generated text."""

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure

from aligners.reports import drawing
from aligners.reports.names import WORDS, aligned, with_short_names
from aligners.reports.report import Report, Row, distinct, grouped, is_known
from aligners.reports.runs.updates.generated_report import generation_tables
from aligners.reports.screen import ROLE_STYLES, SiteTable
from aligners.reports.templates import sentences

PANEL = (3.4, 2.8)
STYLES = {"native": "-", "carried": "--"}


def report(
    meta: Row,
    rows: Sequence[Row],
    equal: Sequence[Row],
    generation: Sequence[Row] = (),
    samples: Sequence[Row] = (),
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
    table = SiteTable(
        WORDS["steering"][effect], ["direction"], ["site"], {"at KL": heads, "% of native": heads}
    )
    for (method, site), line in grouped(equal, "method", "site").items():
        cells = [aligned(row["value"]) for row in line]
        cells += [aligned(None if row["share"] is None else 100 * row["share"], 0) for row in line]
        table.add_row(
            method,
            str(site),
            *cells,
            style=ROLE_STYLES["floor"] if line[0]["role"] == "random" else None,
        )
    return table


def figure(rows: Sequence[Row], effects: Sequence[str]) -> Figure:
    """Draw effect (up) against cost (across): a panel for each effect and site; random directions in grey."""
    panels = [(effect, site) for effect in effects for site in distinct(rows, "site")]
    made, axes = drawing.panels(len(panels), len(panels) // len(effects), PANEL, (1.6, 0.8))
    names = distinct(rows, "method")
    for axis, (effect, site) in zip(axes, panels, strict=True):
        here = [row for row in rows if row["site"] == site and row["alpha"] > 0 and row["kl"]]
        for (name, role), line in grouped(here, "method", "role").items():
            columns = ("kl", effect, f"{effect}_low", f"{effect}_high")
            costs, values, low, high = ([row[column] for row in line] for column in columns)
            if role == "random":
                axis.plot(costs, values, label=role, color="0.8", zorder=0)
            else:
                look = drawing.line_look(names.index(name), names.index(name), STYLES[role])
                axis.plot(costs, values, label=name, **look)
                axis.fill_between(costs, low, high, color=look["color"], alpha=0.15, linewidth=0)
        axis.axhline(0, color="0.6", linewidth=0.8, zorder=0)
        axis.set(xscale="log", ylabel=WORDS["steering"][effect] if site == panels[0][1] else "")
        axis.set_title(f"site {site}", fontsize=9)
    drawing.dress(made, axes, "cost: KL(own ‖ steered), nats a token", "")
    return made
