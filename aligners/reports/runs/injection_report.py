"""The report of an injection: errors, what the model does with mapped states, and the price of bijectivity."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain, product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aligners.fitting.training_status import (
    BOTH_WAYS,
    TRAINED,
    beside_far_rows,
    is_trained,
    mark,
    what_did_not_train,
)
from aligners.reports import drawing
from aligners.reports.closest import known_lines, trained
from aligners.reports.names import (
    WORDS,
    aligned,
    blank,
    fixed,
    listed,
    score_heading,
    score_words,
    site_names,
    span,
    with_short_names,
)
from aligners.reports.report import (
    Report,
    Row,
    by_sites,
    grouped,
    is_known,
    known,
    largest,
    mean,
    number,
    numbers,
    site_pairs,
    where,
)
from aligners.reports.runs.injection_words import (
    LEAD,
    of_tokens,
    panel_title,
    panel_words,
    panels_of,
)
from aligners.reports.runs.updates.generated_report import (
    generation_tables,
    generation_words,
)
from aligners.reports.screen import ROLE_STYLES, SiteTable

ALIKE = 0.05  # numbers of parameters within this share count as equal
TOLD_APART = 0.02  # mean top 1 of maps that differ by as much
MOST_PANELS = 4  # of which retrieval is said one by one
COLUMN_GROUPS = WORDS["injection"]
FVU_LABELS = WORDS["fvu"]
CLOSED, OTHERS, FLOORS = "closed forms", "trained maps", "floors"
FVU_TOP = 10.0  # an inverse can be far worse than the mean, and would squeeze the lines below 1
PLACE = ("model_x", "model_y", "direction", "rows", "site_x", "site_y")


def report(
    meta: Row,
    rows: Sequence[Row],
    generation: Sequence[Row] = (),
    samples: Sequence[Row] = (),
) -> Report:
    """Make the report from one row for each method, site, direction and kind of rows.

    Args:
        meta: what holds for all rows.
        rows: see above.
        generation: a row for each method and site whose generated text was measured.
        samples: some of these texts.
    """
    shown = with_short_names(rows)
    tables = {}
    if generation:
        tables = {"generation": generation, "samples": samples}
    figures = {}
    for name, (column, draw) in FIGURES.items():
        if is_known(shown, column):
            figures[name] = partial(draw, shown)
    findings = reading(shown, begun=True).splitlines()
    for panel in panels_of(shown):
        for sentence in beside_far_rows(panel):
            findings.append(f"- {panel_title(panel)}: {sentence}")
    findings += generation_words(with_short_names(generation)) + left_out(meta)
    judged = {
        "price_of_bijectivity": price_of_bijectivity(rows),
        "below_chance": below_chance(rows),
    }
    return Report(
        "report",
        meta | judged,
        rows,
        tables,
        figures=figures,
        screen=[*console_tables(shown), *generation_tables(generation, samples)],
        note="\n".join(_draws(shown)),
        lead=" ".join(_words(panels_of(shown)[0])[:LEAD]),
        sentences=findings,
    )


# ---------------------------------------------------------------------- what is judged


def price_of_bijectivity(rows: Sequence[Row]) -> list[Row]:
    """Divide each trained bijection's FVU by that of an unconstrained network of equal size, site by site.

    A bijection is compared in the directions in which it was trained, with networks trained in the same direction. A
    ratio of 1 means that being invertible costs nothing.
    """
    prices = []
    for here in grouped(filter(is_trained, rows), *PLACE).values():
        networks = [
            row for row in known(here, "fvu") if row["fit"] in (TRAINED, BOTH_WAYS)
        ]
        for row, other in product(networks, networks):
            far = abs(other["parameters"] - row["parameters"])
            if not row["bijective"] or other["bijective"] or other["fit"] != TRAINED:
                continue
            if other["fvu"] and far <= ALIKE * row["parameters"]:
                price = {key: row[key] for key in (*PLACE, "method", "fit")}
                price |= {
                    "against": other["method"],
                    "ratio": row["fvu"] / other["fvu"],
                }
                prices.append(price)
    return prices


def below_chance(rows: Sequence[Row]) -> list[Row]:
    """Find models whose own score is below the interval of random labels."""
    below: dict[str, Row] = {}
    for panel in panels_of(rows):
        random = known(where(panel, method="random_label"), "score_low")
        for row in known(panel, "score"):
            if row["method"] not in ("native_x", "native_y") or not random:
                continue
            model = row[f"model_{row['method'][-1]}"]
            chance = random[0]["score_low"]
            if row["score"] < chance:
                found = {
                    "method": row["method"],
                    "score": row["score"],
                    "chance_low": chance,
                }
                below[model] = {"model": model, **found}
    return list(below.values())


# ---------------------------------------------------------------------- what is said


def _words(panel: Sequence[Row]) -> list[str]:
    return panel_words(panel, price_of_bijectivity(panel))


def reading(rows: Sequence[Row], *, begun: bool = False) -> str:
    """Say of each panel whether Y still does its task, how exact the maps are, and whether they are vocabularies.

    Args:
        rows: rows of a report.
        begun: whether its lead has been read, which says the first sentences on the first panel.
    """
    lines = []
    for entry in below_chance(rows):
        own = fixed(100 * entry["score"], ".1f")
        chance = fixed(100 * entry["chance_low"], ".1f")
        lines.append(
            f"Caution: {entry['model']} by itself scores {own}, below what random labels get (from {chance}). Its "
            "classes may be in another order than the texts' (see `labels` in report.json; `--data.labels` says which "
            "are which), or it was trained on another task."
        )
    paragraphs = list(map(_words, panels_of(rows)))
    if begun:
        paragraphs[0] = paragraphs[0][LEAD:]
    lines += [" ".join(words) for words in paragraphs if words]
    return "\n".join([*lines, *what_did_not_train(rows)])


def retrieval(rows: Sequence[Row]) -> list[str]:
    """Say of each panel how often mapped rows find their partners, where this tells maps apart."""
    maps = known(where(rows, role="method"), "top1_all")
    panels = {}
    for panel in grouped(maps, "model_x", "model_y", "rows").values():
        panels[panel_title(panel)] = panel
    if len(panels) > MOST_PANELS:
        panels = {f"{len(panels)} pairs of models": maps}
    said = []
    for title, panel in panels.items():
        lines = trained(known_lines(panel, "top1_all"))
        means = [mean(line, "top1_all") for line in lines.values()]
        if len(means) < 2 or max(means) - min(means) < TOLD_APART:
            continue
        each = [
            f"{span(line, 'top1_all', '.1%')} with {name}"
            for name, line in lines.items()
        ]
        count = span(panel, "candidates_all", ",.0f")
        nearest = (
            f"the nearest of {count} rows of the target is the partner of a mapped row"
        )
        sentence = f"{title}: {nearest} (top 1) for {listed(each)}"
        centred = [mean(line, "top1_all_centred") for line in lines.values()]
        if max(centred) - max(means) >= TOLD_APART:
            most = max(largest(line, "top1_all_centred") for line in lines.values())
            sentence += f"; after the target's mean is subtracted, for up to {most:.1%}"
        said.append(f"{sentence}.")
    return said


def left_out(meta: Row) -> list[str]:
    """Say what was not injected or not measured, and why."""
    said = []
    for direction, why in meta.get("not_injected", {}).items():
        said.append(f"Nothing was injected {direction}: {why}.")
    for name, why in meta.get("refusals", {}).items():
        said.append(f"Left out, {name}: {why}")
    return said


def _draws(rows: Sequence[Row]) -> list[str]:
    """Return the floors that are means over draws, with their ranges."""
    said: dict[str, None] = {}
    for row in known(rows, "score"):
        if row["site_x"] is None and row.get("fit"):
            scores = f"{100 * row['score_low']:.1f} to {100 * row['score_high']:.1f}"
            unit = score_words([row])
            said[
                f"{row['method']} ({row['model_y']}): {row['fit']}: {scores} ({unit})"
            ] = None
    return list(said)


# ---------------------------------------------------------------------- tables


def console_tables(rows: Sequence[Row]) -> list[SiteTable]:
    """Make a table for each direction and kind of rows: methods down, sites across.

    Groups of columns are penalty, loss, KL, score, FVU, FVU on unseen types and on other text, FVU of the inverse, and
    top 1 of retrieval. A group without numbers is left out.
    """
    return [_table(panel) for panel in panels_of(rows)]


def _table(panel: list[Row]) -> SiteTable:
    pairs = site_pairs(panel)
    names = site_names(pairs)
    columns = [column for column in COLUMN_GROUPS if is_known(panel, column)]
    if "loss" in columns and "penalty" not in columns:
        columns.remove(
            "loss"
        )  # where numbers are predicted, the loss is in their own unit
    across = {
        COLUMN_GROUPS[column] or score_heading(panel): names for column in columns
    }
    table = SiteTable(panel_title(panel), ["method"], ["parameters"], across)
    for name, line in grouped(panel, "method").items():
        sites = by_sites(line)
        first = line[0]
        cells = [blank(first["parameters"] or None, ",")]
        for column, pair in product(columns, pairs):
            cells.append(_cell(sites.get(pair, first), column))
        table.add_row(name, *cells, style=ROLE_STYLES.get(first["role"]))
    return table


def _cell(row: Row, column: str) -> str:
    if column == "score":
        return mark(aligned(100 * number(row[column]), 1), row)
    return mark(aligned(row[column]), row)


# ---------------------------------------------------------------------- figures


def fvu_figure(rows: Sequence[Row]) -> Figure:
    """Draw FVU against site on a logarithmic scale: a line for each method, panels for each direction.

    Where they are known, FVU on the rows of unseen types and on another source of text follow below.
    """
    heights = [name for name in FVU_LABELS if name == "fvu" or is_known(rows, name)]
    parts = _parts(panels_of(rows), _styles(rows))
    count = len(heights) * len(parts)
    figure, axes = drawing.panels(
        count, len(parts), drawing.PANEL, (1.9, 1.1), sharey=True
    )
    beyond: list[str] = []
    starts: list[str] = []
    for axis, (height, part) in zip(axes, product(heights, parts), strict=True):
        off_scale, untrained = _draw_fvu(axis, part, height)
        beyond += off_scale
        starts += untrained
        axis.axhline(1, color="0.6", linewidth=0.8, zorder=0)
        drawing.name_sites(
            axis, part.title if height == "fvu" else "", site_names(part.pairs)
        )
        if part is parts[0]:
            axis.set_ylabel(FVU_LABELS[height])
    drawing.log_scale(axes)
    across = "site (layer)"
    if beyond:
        across += (
            f"\nabove {FVU_TOP:g}, off the scale: {', '.join(dict.fromkeys(beyond))}"
        )
    if starts:
        across += f"\n{drawing.HOLLOW} ({', '.join(sorted(set(starts)))})"
    drawing.dress(figure, axes, across, "")
    return figure


def _draw_fvu(
    axis: Axes, part: drawing.SitePanel, height: str
) -> tuple[list[str], list[str]]:
    """Draw the lines of a panel; returns those that leave the scale, and those with a map that is not trained."""
    beyond = []
    starts = []
    for name, style, cells in part.lines:
        line = list(filter(None, cells))
        fvus = np.array(numbers(line, height))
        shown = np.where(fvus < FVU_TOP, fvus, math.nan)
        label = name if np.isfinite(shown).any() else None
        if drawing.line_of_maps(
            axis, range(len(line)), list(shown), line, label, style
        ):
            starts.append(name)
        if (fvus >= FVU_TOP).any():
            beyond.append(f"{name} into {line[0]['model_y']}")
    return beyond, starts


def penalty_figure(rows: Sequence[Row]) -> Figure:
    """Draw how much injection raises the target's loss, with intervals and floors."""
    unit = "token" if of_tokens(rows) else "text"
    return _by_site(rows, ("floor",), "penalty", f"penalty of injection, nats a {unit}")


def accuracy_figure(rows: Sequence[Row]) -> Figure:
    """Draw the task's score after injection, with intervals, between the ceiling and the floors."""
    up = f"after injection: {score_words(rows)}"
    return _by_site(rows, ("ceiling", "floor"), "score", up, 100)


FIGURES = {  # name -> column without which there is nothing to draw, and what draws it
    "penalty": ("penalty", penalty_figure),
    "fvu": ("fvu", fvu_figure),
    "accuracy": ("score", accuracy_figure),
}


def _by_site(
    rows: Sequence[Row], roles: Sequence[str], column: str, up: str, scale: float = 1
) -> Figure:
    """Draw a column against site where it is known; rows without a site are levels if they have one of `roles`."""
    shown = [panel for panel in panels_of(rows) if is_known(panel, column)]
    styles = _styles(list(chain(*shown)))
    panels = []
    for panel in shown:
        levels = _levels(panel, roles, column)
        panels += [part._replace(levels=levels) for part in _parts([panel], styles)]
    return drawing.site_figure(panels, column, up, scale)


def _levels(
    panel: Sequence[Row], roles: Sequence[str], column: str
) -> list[drawing.Level]:
    """Draw the methods without a site; the ranges of means over draws are thin lines."""
    levels: list[drawing.Level] = []
    ends: list[drawing.Level] = []
    for row in known(panel, column):
        if row["site_x"] is not None or row["role"] not in roles:
            continue
        look = {"linewidth": 1, **drawing.LOOKS["levels"][row["method"]]}
        levels.append((row["method"], look, row[column]))
        if row.get("fit"):
            thin = {**look, "linewidth": 0.5}
            ends += [
                (None, thin, row[f"{column}_low"]),
                (None, thin, row[f"{column}_high"]),
            ]
    return levels + ends


def _parts(
    panels: Sequence[list[Row]], styles: dict[str, drawing.Look]
) -> list[drawing.SitePanel]:
    """Draw a panel's lines in one that can be read, or else closed forms, trained maps and floors each in their own."""
    parts = []
    for panel in panels:
        methods = grouped(panel, "method")
        title = panel_title(panel)
        pairs = site_pairs(panel)
        kinds: dict[str, list[tuple[str, drawing.Look, drawing.Cells]]] = {
            CLOSED: [],
            OTHERS: [],
            FLOORS: [],
        }
        for name, style in styles.items():
            if name in methods:
                line = (name, style, methods[name])
                kinds[_kind(methods[name], style)].append(line)
        together = list(chain(*kinds.values()))
        if len(together) <= drawing.MOST_LINES:
            together.sort(key=lambda line: list(styles).index(line[0]))
            parts.append(drawing.SitePanel(title, pairs, together))
            continue
        for kind, lines in kinds.items():
            for share in drawing.evenly(lines):
                parts.append(drawing.SitePanel(f"{title}\n{kind}", pairs, share))
    return parts


def _kind(line: Sequence[Row], style: drawing.Look) -> str:
    if line[0]["role"] == "floor":
        return FLOORS
    return CLOSED if style["linestyle"] == "--" else OTHERS


def _styles(rows: Sequence[Row]) -> dict[str, drawing.Look]:
    """Say how to draw each method that has sites, in every panel: closed forms dashed, floors dotted."""
    methods = grouped(known(rows, "site_x"), "method")
    ordered = sorted(methods, key=lambda name: methods[name][-1]["role"] == "floor")
    styles = drawing.method_looks(ordered)
    for name, line in methods.items():
        if line[-1]["role"] != "floor" and line[0].get("fit") == "closed form":
            styles[name]["linestyle"] = "--"
    return styles
