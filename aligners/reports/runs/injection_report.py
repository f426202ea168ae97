"""The report of an injection: errors, what the model does with mapped states, and the price of bijectivity."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np
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
from aligners.reports.names import (
    WORDS,
    aligned,
    fixed,
    score_heading,
    score_words,
    site_name,
    with_short_names,
)
from aligners.reports.report import (
    Report,
    Row,
    by_sites,
    grouped,
    is_known,
    number,
    site_pairs,
    where,
)
from aligners.reports.runs.injection_words import (
    lead,
    of_tokens,
    panel_title,
    panel_words,
    panels_of,
)
from aligners.reports.runs.updates.generated_report import generation_tables
from aligners.reports.screen import ROLE_STYLES, SiteTable
from aligners.reports.templates import sentences

ALIKE = 0.05  # numbers of parameters within this share count as equal
TOLD_APART = 0.02  # mean top 1 of maps that differ by as much
MOST_PANELS = 4  # of which retrieval is said one by one
COLUMN_GROUPS, FVU_LABELS = WORDS["injection"], WORDS["fvu"]  # for the score see score_heading
MOST_NUMBERS_ABREAST = 12
KINDS = CLOSED, OTHERS, FLOORS = "closed forms", "trained maps", "floors"
FVU_TOP = (
    10.0  # an inverse can be arbitrarily worse than the mean, and would squeeze the lines below 1
)


def price_of_bijectivity(rows: Sequence[Row]) -> list[Row]:
    """Divide each trained bijection's FVU by that of an unconstrained network of equal size, site by site.

    A bijection is compared in the directions in which it was trained, with networks trained in the same direction. A
    ratio of 1 means that being invertible costs nothing.
    """
    place = ("model_x", "model_y", "direction", "rows", "site_x", "site_y")
    rows = [row for row in rows if is_trained(row)]
    free = [row for row in rows if row["fit"] == TRAINED and not row["bijective"]]
    return [
        {key: row[key] for key in (*place, "method", "fit")}
        | {"against": other["method"], "ratio": row["fvu"] / other["fvu"]}
        for row in rows
        if row["bijective"] and row["fit"] in (TRAINED, BOTH_WAYS) and row["fvu"] is not None
        for other in free
        if other["fvu"]
        and all(other[key] == row[key] for key in place)
        and abs(other["parameters"] - row["parameters"]) <= ALIKE * row["parameters"]
    ]


def below_chance(rows: Sequence[Row]) -> list[Row]:
    """Find models whose own score is below the interval of random labels."""
    below: dict[str, Row] = {}
    for panel in panels_of(rows):
        chance = next((row["score_low"] for row in where(panel, method="random_label")), None)
        for method in ("native_x", "native_y"):
            for row in where(panel, method=method):
                if None not in (chance, row["score"]) and row["score"] < chance:
                    model = row[f"model_{method[-1]}"]
                    below[model] = {
                        "model": model,
                        "method": method,
                        "score": row["score"],
                        "chance_low": chance,
                    }
    return list(below.values())


def reading(rows: Sequence[Row], *, begun: bool = False) -> str:
    """Say of each panel whether Y still does its task, how exact the maps are, and whether they are vocabularies.

    Args:
        rows: of a report.
        begun: whether the report's lead has been read, which says some of it of the first panel.
    """
    lines = []
    for entry in below_chance(rows):
        own, chance = (fixed(100 * entry[name], ".1f") for name in ("score", "chance_low"))
        lines.append(
            f"Caution: {entry['model']} by itself scores {own}, below what random labels get (from {chance}). Its "
            "classes may be in another order than the texts' (see `labels` in report.json; `--data.labels` says which "
            "are which), or it was trained on another task."
        )
    for place, panel in enumerate(panels_of(rows)):
        lines.append(panel_words(panel, price_of_bijectivity(panel), begun=begun and place == 0))
    return "\n".join([*lines, *what_did_not_train(rows)])


def retrieval(rows: Sequence[Row]) -> list[str]:
    """Say of each panel how often mapped rows find their partners, where this tells maps apart."""
    maps = [row for row in rows if row["role"] == "method" and row.get("top1_all") is not None]
    panels = {
        panel_title(panel): panel for panel in grouped(maps, "model_x", "model_y", "rows").values()
    }
    if len(panels) > MOST_PANELS:
        panels = {f"{len(panels)} pairs of models": maps}
    return sentences("retrieval", panels=panels, least=TOLD_APART)


def report(
    meta: Row, rows: Sequence[Row], generation: Sequence[Row] = (), samples: Sequence[Row] = ()
) -> Report:
    """Make the report from one row for each method, site, direction and kind of rows.

    Args:
        meta: what holds for all rows.
        rows: see above.
        generation: a row for each method and site whose generated text was measured.
        samples: some of these texts.
    """
    shown = with_short_names(rows)
    about = {"price_of_bijectivity": price_of_bijectivity(rows), "below_chance": below_chance(rows)}
    figures = {
        name: partial(draw, shown)
        for name, (column, draw) in FIGURES.items()
        if is_known(rows, column)
    }
    written = sentences("generation", rows=with_short_names(generation))
    findings = [
        *reading(shown, begun=True).splitlines(),
        *_beside_far(shown),
        *written,
        *sentences("left_out", meta=meta),
    ]
    screen = [*console_tables(shown), *generation_tables(generation, samples)]
    means = [
        row for row in shown if row["site_x"] is None and row.get("fit")
    ]  # over draws; earlier versions had one
    note = "\n".join(dict.fromkeys(sentences("draws", rows=means)))
    tables = {"generation": generation, "samples": samples} if generation else {}
    first = lead(shown)
    return Report(
        "report",
        meta | about,
        rows,
        tables,
        figures=figures,
        screen=screen,
        note=note,
        lead=first,
        sentences=findings,
    )


def _beside_far(rows: Sequence[Row]) -> list[str]:
    """What errors are with far rows, or without them, panel by panel."""
    found = []
    for panel in panels_of(rows):
        found += [f"- {panel_title(panel)}: {sentence}" for sentence in beside_far_rows(panel)]
    return found


def console_tables(rows: Sequence[Row]) -> list[SiteTable]:
    """Make tables for each direction and kind of rows: methods down, sites across.

    Groups of columns are penalty, loss, score, FVU, FVU on unseen types and on other text, FVU of the inverse, and top
    1 of retrieval.
    Where there are many sites each has a table of its own. A group without numbers is left out.
    """
    tables = []
    for panel in panels_of(rows):
        pairs = site_pairs(panel)
        nats = is_known(
            panel, "penalty"
        )  # where numbers are predicted, the loss is in their own unit
        groups = [
            name for name in COLUMN_GROUPS if is_known(panel, name) and (nats or name != "loss")
        ]
        count = math.ceil(len(groups) / max(1, MOST_NUMBERS_ABREAST // len(pairs)))
        tables += [_table(panel, pairs, list(part)) for part in np.array_split(groups, count)]
    return tables


def _table(panel: list[Row], pairs: list[tuple[int, int]], columns: list[str]) -> SiteTable:
    names = [site_name(pair) for pair in pairs]
    across = {COLUMN_GROUPS[column] or score_heading(panel): names for column in columns}
    table = SiteTable(panel_title(panel), ["method"], ["parameters"], across)
    for name, method_rows in grouped(panel, "method").items():
        line, first = by_sites(method_rows), method_rows[0]
        cells = [mark(aligned(100 * number(row[column]), 1) if column == "score" else aligned(row[column]), row)
                 for column in columns for row in (line.get(pair, first) for pair in pairs)]  # fmt: skip
        parameters = f"{first['parameters']:,}" if first["parameters"] else ""
        table.add_row(name, parameters, *cells, style=ROLE_STYLES.get(first["role"]))
    return table


def fvu_figure(rows: Sequence[Row]) -> Figure:
    """Draw FVU against site on a logarithmic scale: a line for each method, panels for each direction.

    Where they are known, FVU on the rows of unseen types and on another source of text follow below.
    """
    heights = [name for name in FVU_LABELS if name == "fvu" or is_known(rows, name)]
    styles = _styles(rows)
    parts = [part for panel in panels_of(rows) for part in _parts(panel, styles)]
    figure, axes = drawing.panels(
        len(heights) * len(parts), len(parts), drawing.PANEL, (1.9, 1.1), sharey=True
    )
    beyond: dict[str, None] = {}
    starts: set[str] = set()
    for axis, (height, part) in zip(axes, product(heights, parts), strict=True):
        for name, style, cells in part.lines:
            line = [row for row in cells if row is not None]
            values = [number(row.get(height)) for row in line]
            shown = [value if value < FVU_TOP else math.nan for value in values]
            on_scale = [math.isfinite(value) for value in shown]
            if drawing.line_of_maps(
                axis, range(len(line)), shown, line, name if any(on_scale) else None, style
            ):
                starts.add(name)
            if any(value >= FVU_TOP for value in values):
                beyond[f"{name} into {line[0]['model_y']}"] = None
        axis.axhline(1, color="0.6", linewidth=0.8, zorder=0)
        drawing.name_sites(axis, part.title if height == "fvu" else "", map(site_name, part.pairs))
        if part is parts[0]:
            axis.set_ylabel(FVU_LABELS[height])
    drawing.log_scale(axes)
    notes = [f"above {FVU_TOP:g}, off the scale: {', '.join(beyond)}"] if beyond else []
    notes += [f"{drawing.HOLLOW} ({', '.join(sorted(starts))})"] if starts else []
    drawing.dress(figure, axes, "\n".join(["site (layer)", *notes]), "")
    return figure


def penalty_figure(rows: Sequence[Row]) -> Figure:
    """Draw how much injection raises the target's loss, with intervals and floors."""
    unit = "token" if of_tokens(rows) else "text"
    return _by_site(rows, ("floor",), "penalty", f"penalty of injection, nats a {unit}")


def accuracy_figure(rows: Sequence[Row]) -> Figure:
    """Draw the task's score after injection, with intervals, between the ceiling and the floors."""
    return _by_site(
        rows, ("ceiling", "floor"), "score", f"after injection: {score_words(rows)}", 100
    )


def _by_site(
    rows: Sequence[Row], roles: Sequence[str], column: str, up: str, scale: float = 1
) -> Figure:
    """Draw a column against site where it is known; rows without a site are levels if they have one of `roles`."""
    shown = [panel for panel in panels_of(rows) if is_known(panel, column)]
    styles = _styles([row for panel in shown for row in panel])
    looks, panels = drawing.LOOKS["levels"], []
    for panel in shown:
        without = [
            row
            for row in panel
            if row["site_x"] is None and row["role"] in roles and row[column] is not None
        ]
        levels = [
            (row["method"], {"linewidth": 1, **looks[row["method"]]}, row[column])
            for row in without
        ]
        for row, end in product(without, ("_low", "_high")):
            if row.get("fit"):  # a mean over draws
                levels.append((None, {**looks[row["method"]], "linewidth": 0.5}, row[column + end]))
        panels += [part._replace(levels=levels) for part in _parts(panel, styles)]
    return drawing.site_figure(panels, column, up, scale)


def _parts(panel: list[Row], styles: dict[str, drawing.Look]) -> list[drawing.SitePanel]:
    """Draw a panel's lines in one that can be read, or else closed forms, trained maps and floors each in their own."""
    methods = grouped(panel, "method")
    lines = {
        name: (name, style, methods[name]) for name, style in styles.items() if name in methods
    }
    title, pairs = panel_title(panel), site_pairs(panel)
    if len(lines) <= drawing.MOST_LINES:
        return [drawing.SitePanel(title, pairs, list(lines.values()))]
    parts = []
    for kind in KINDS:
        names = [name for name, (_, style, line) in lines.items() if _kind(line, style) == kind]
        for share in drawing.evenly(names):
            parts.append(
                drawing.SitePanel(f"{title}\n{kind}", pairs, [lines[name] for name in share])
            )
    return parts


def _kind(line: Sequence[Row], style: drawing.Look) -> str:
    if line[0]["role"] == "floor":
        return FLOORS
    return CLOSED if style["linestyle"] == "--" else OTHERS


def _styles(rows: Sequence[Row]) -> dict[str, drawing.Look]:
    """Say how to draw each method that has sites, in every panel: closed forms dashed, floors dotted."""
    roles = {row["method"]: row["role"] for row in rows if row["site_x"] is not None}
    solved = {row["method"] for row in rows if row.get("fit") == "closed form"}
    styles = drawing.method_looks(sorted(roles, key=lambda name: roles[name] == "floor"))
    for name in solved:
        if roles.get(name, "floor") != "floor":
            styles[name]["linestyle"] = "--"
    return styles


FIGURES = {  # name -> column without which there is nothing to draw, and what draws it
    "penalty": ("penalty", penalty_figure),
    "fvu": ("fvu", fvu_figure),
    "accuracy": ("score", accuracy_figure),
}
