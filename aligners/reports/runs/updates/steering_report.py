"""The report of steering: effect against cost, effects at equal cost, and generated text."""

from collections.abc import Sequence
from functools import partial
from operator import itemgetter

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aligners.reports import drawing
from aligners.reports.names import (
    WORDS,
    aligned,
    fixed,
    in_words,
    span,
    with_short_names,
)
from aligners.reports.report import (
    Report,
    Row,
    distinct,
    grouped,
    is_known,
    known,
    numbers,
    values,
    where,
)
from aligners.reports.runs.updates.generated_report import generation_tables
from aligners.reports.screen import ROLE_STYLES, SiteTable

PANEL = (3.4, 2.8)
STYLES = {"native": "-", "carried": "--"}
EFFECTS = {"words": "the log-odds of the words", "reading": "what the probe reads"}


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
        "steering",
        meta,
        rows,
        {"equal": equal, "generation": generation, "samples": samples},
        figures={"steering": partial(figure, shown, effects)},
        screen=screen + generation_tables(generation, samples),
        lead=lead(shown, equal),
        sentences=_shares(equal) + _written(generation),
    )


# ---------------------------------------------------------------------- what is said


def _at_middle_cost(equal: Sequence[Row]) -> list[Row]:
    """Return the rows at the middle one of the costs."""
    levels = sorted(distinct(equal, "kl"))
    return where(equal, kl=levels[len(levels) // 2])


def _by_chance(row: Row, random: Sequence[Row]) -> bool:
    """Tell whether a direction has no more effect than random directions."""
    if row["value"] is None or not is_known(random, "value"):
        return False
    return bool(random[0]["value_low"] <= row["value"] <= random[0]["value_high"])


def lead(rows: Sequence[Row], equal: Sequence[Row]) -> str:
    """Say what the best direction does at the middle cost, beside random ones and carried ones.

    Args:
        rows: rows of the report, with short names of models.
        equal: likewise.
    """
    effect = equal[0]["effect"]
    model = rows[0]["model"]
    here = where(_at_middle_cost(equal), effect=effect)
    level = f"{here[0]['kl']:g} nats"
    here = known(here, "value")
    named = [row for row in here if row["role"] != "random"]
    if not named:
        return f"{model} was steered, but no amount of a direction that was tried costs {level} a token."
    native = where(named, role="native")
    alike = native or where(named, role=named[0]["role"])
    best = sorted(alike, key=itemgetter("value"))[-1]
    moved = in_words(best, "value", "+.3f")
    if effect == "words":
        moved += " nats"
    said = (
        f"Steering {model} by {best['method']} at site {best['site']} moves {EFFECTS[effect]} by {moved} "
        f"where it costs {level} of KL a token (n = {rows[0]['n_texts']:,} texts)."
    )
    random = where(here, role="random", site=best["site"])
    by_chance = _by_chance(best, random)
    for row in random:
        low = fixed(row["value_low"], "+.3f")
        high = fixed(row["value_high"], "+.3f")
        said += f" Directions drawn at random move it by {low} to {high} there"
        said += (
            ": what it does is no more than chance, and shares of it say nothing."
            if by_chance
            else "."
        )
    carried = known(where(here, role="carried"), "share")
    if carried and not by_chance:
        share = span(carried, "share", ".0%")
        said += f" Carried directions have {share} of the native effect at equal cost."
    return said


def _shares(equal: Sequence[Row]) -> list[str]:
    """State each carried direction's share of the native effect, where that exceeds chance."""
    said = []
    for (effect, site), line in grouped(
        _at_middle_cost(equal), "effect", "site"
    ).items():
        words = WORDS["steering"][effect]
        native = where(line, role="native")
        if native and _by_chance(native[0], where(line, role="random")):
            said.append(
                f"At site {site} the native direction has no more effect ({words}) than directions drawn at random: "
                "shares of it say nothing."
            )
            continue
        for row in known(where(line, role="carried"), "share"):
            share = f"{in_words(row, 'share', '.0%')} of the native effect ({words})"
            said.append(
                f"{row['method']} at site {site} has {share} at KL {row['kl']:g}."
            )
    return said


def _written(generation: Sequence[Row]) -> list[str]:
    """Say how probable the model finds what it writes with a direction added."""
    said = []
    for row in generation:
        if row["role"] in ("ceiling", "random"):
            continue
        own = where(generation, method="own")[0]["perplexity"]
        said.append(
            f"With {row['alpha']:.2f} of {row['method']} at site {row['site_x']} added, what the model writes has a "
            f"perplexity of {row['perplexity']:.2f} under itself ({own:.2f} without)."
        )
    return said


# ---------------------------------------------------------------------- table and figure


def _table(effect: str, equal: Sequence[Row]) -> SiteTable:
    heads = [f"{level:g}" for level in distinct(equal, "kl")]
    groups = {"at KL": heads, "% of native": heads}
    table = SiteTable(WORDS["steering"][effect], ["direction"], ["site"], groups)
    for (method, site), line in grouped(equal, "method", "site").items():
        cells = list(map(aligned, values(line, "value")))
        cells += [aligned(share, 0) for share in numbers(line, "share", 100)]
        style = {"random": ROLE_STYLES["floor"]}.get(line[0]["role"])
        table.add_row(method, str(site), *cells, style=style)
    return table


def figure(rows: Sequence[Row], effects: Sequence[str]) -> Figure:
    """Draw effect (up) against cost (across): a panel for each effect and site; random directions in grey."""
    sites = distinct(rows, "site")
    count = len(effects) * len(sites)
    made, axes = drawing.panels(count, len(sites), PANEL, (1.6, 0.8))
    names = distinct(rows, "method")
    for place, axis in enumerate(axes):
        effect = effects[place // len(sites)]
        site = sites[place % len(sites)]
        here = [row for row in where(rows, site=site) if row["alpha"] > 0 and row["kl"]]
        for name, line in grouped(here, "method").items():
            _draw(axis, line, effect, names.index(name))
        axis.axhline(0, color="0.6", linewidth=0.8, zorder=0)
        axis.set_xscale("log")
        if site == sites[0]:
            axis.set_ylabel(WORDS["steering"][effect])
        axis.set_title(f"site {site}", fontsize=9)
    drawing.dress(made, axes, "cost: KL(own ‖ steered), nats a token", "")
    return made


def _draw(axis: Axes, line: Sequence[Row], effect: str, place: int) -> None:
    costs = values(line, "kl")
    effects = numbers(line, effect)
    role = line[0]["role"]
    if role == "random":
        axis.plot(costs, effects, label=role, color="0.8", zorder=0)
        return
    look = drawing.line_look(place, place, STYLES[role])
    axis.plot(costs, effects, label=line[0]["method"], **look)
    low = numbers(line, f"{effect}_low")
    high = numbers(line, f"{effect}_high")
    axis.fill_between(costs, low, high, color=look["color"], alpha=0.15, linewidth=0)
