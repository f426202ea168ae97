"""The report of an injection: errors, what the model does with mapped states, and the price of bijectivity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise, product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from aligners.fitting.outcomes import is_trained, mark, no_better_than_the_mean, trained_methods, what_did_not_train
from aligners.injection.methods import BOTH_WAYS, TRAINED
from aligners.reports import drawing
from aligners.reports.names import score_heading, score_words, site_name, value_range, with_short_names
from aligners.reports.report import Report, Row, grouped, number, site_pairs, where
from aligners.reports.screen import site_table
from aligners.reports.templates import sentences

ALIKE = 0.05  # numbers of parameters within this share count as equal
KEPT = 0.015  # an accuracy that loses no more than this counts as kept
VOCABULARY = 2.0  # a map whose FVU is this many times higher on unseen types is called partly a vocabulary
PLAIN = ("linear", "ridge")  # baselines, of which the closer is named
ALL_TOKENS = "tokens"
DRAWN = {"penalty": "perplexity", "fvu": "fvu", "accuracy": "score"}  # the column of each figure
COLUMN_GROUPS = {
    "penalty": ("penalty", False),  # of language models
    "fvu": ("FVU", False), "fvu_unseen": ("unseen", False), "fvu_other": ("other", False),
    "fvu_inverse": ("inverse", False), "score": ("", True),  # see score_heading
}  # fmt: skip
MOST_NUMBERS_ABREAST = 12
KINDS = CLOSED, OTHERS, FLOORS = "closed forms", "trained maps", "floors"
FVU_TOP = 10.0  # an inverse can be arbitrarily worse than the mean, and would squeeze the lines below 1
FVU_LABELS = {
    "fvu": "FVU: share of variance left unexplained",
    "fvu_unseen": "FVU on types that no map saw",
    "fvu_other": "FVU on the other text",
}
LEVELS: dict[str, drawing.Look] = {
    "native_y": {"color": "0.1", "linestyle": "-"},
    "native_x": {"color": "0.1", "linestyle": "--"},
    "random_classifier": {"color": "0.5", "linestyle": "-."},
    "random_label": {"color": "0.5", "linestyle": (0, (1, 3))},
    "constant_label": {"color": "0.5", "linestyle": (0, (6, 3))},
    "unigram": {"color": "0.5", "linestyle": (0, (6, 3))},
}


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
                    below[model] = {"model": model, "method": method, "score": row["score"], "chance_low": chance}
    return list(below.values())


def reading(rows: Sequence[Row]) -> str:
    """Say of each panel whether Y still does its task, how exact the maps are, and whether they are vocabularies."""
    panels = [_facts(panel) for panel in panels_of(rows)]
    said = sentences("injection", below_chance=below_chance(rows), panels=panels)
    return "\n".join([*said, *what_did_not_train(rows)])


def panels_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Group the rows by pair of models, direction and kind of rows, in the order of their first appearance."""
    return list(grouped(rows, "model_x", "model_y", "direction", "rows").values())


def of_tokens(panel: Sequence[Row]) -> bool:
    """Tell whether the target is a language model, whose loss is in nats a token."""
    return any(row.get("perplexity") is not None for row in panel)


def panel_title(panel: Sequence[Row]) -> str:
    """Name the models, and the rows if they are not tokens."""
    first = panel[0]
    kind = first.get("rows", ALL_TOKENS)
    return f"{first['model_x']} → {first['model_y']}" + ("" if kind == ALL_TOKENS else f", rows: {kind}")


def _facts(panel: list[Row]) -> Row:
    """What the sentences on a panel are made of: lines of methods, and what stands out among them."""
    methods = {
        name: where(panel, method=name) for name in trained_methods([r for r in panel if r["site_x"] is not None])
    }
    mapped, beyond = _measured(methods, "fvu"), _measured(methods, "fvu_seen", "fvu_unseen")
    closest = _closest(mapped, "fvu")
    plain = {name: mapped[name] for name in PLAIN if name in mapped}
    prices = grouped(price_of_bijectivity(panel), "method", "against").items()
    native = next((row for row in panel if row["method"] == "native_y"), {"loss": None, "score": None})
    tokens = of_tokens(panel)
    own = native["loss" if tokens else "score"]
    behaviour = {} if own is None else _penalties(methods) if tokens else _scores(methods, own)
    return {
        "title": panel_title(panel),
        "source": panel[0]["model_x"],
        "target": panel[0]["model_y"],
        "of_tokens": tokens,
        "scored": any(row["score"] is not None for row in panel),
        "score": score_words(panel),
        "native": native,
        "own": own,
        **behaviour,
        "closest": closest,
        "baseline": _closest(plain, "fvu") if closest and closest[0] not in PLAIN else None,
        "prices": [f"{name} {value_range([r['ratio'] for r in line], '.2f')} times {against}"
                   for (name, against), line in prices],
        "no_better": no_better_than_the_mean(panel),
        "unseen": _closest(beyond, "fvu_unseen"),
        "vocabularies": {name: line for name, line in beyond.items()
                         if _total(line, "fvu_unseen") >= VOCABULARY * _total(line, "fvu_seen")},
        "other": _closest(_measured(methods, "fvu_other"), "fvu_other"),
    }  # fmt: skip


def _scores(methods: dict[str, list[Row]], native: float) -> Row:
    """Which maps keep the score of a classifier, and what the others gain and lose at their best and worst sites."""
    known = {name: line for name, line in methods.items() if all(row["score"] is not None for row in line)}
    changes = {name: [row["score"] - native for row in line] for name, line in known.items()
               if line[0]["role"] == "method"}  # fmt: skip
    least = {name: min(points) for name, points in changes.items()}
    most = {name: max(points) for name, points in changes.items()}
    return {
        "margin": f"{100 * KEPT:g}",
        "identity": known.get("identity"),
        "good": [name for name in changes if least[name] >= -KEPT and most[name] <= KEPT],
        "better": [
            f"{100 * most[name]:.1f} points with {name}"
            for name in changes
            if least[name] >= -KEPT and most[name] > KEPT
        ],
        "worse": [f"{-100 * least[name]:.1f} points with {name}" for name in changes if least[name] < -KEPT],
        "lost": [name for name in methods if name not in known],
    }


def _penalties(methods: dict[str, list[Row]]) -> Row:
    """What injection costs a language model, map by map, and which maps the intervals do not tell apart."""
    known = {name: line for name, line in methods.items() if all(row["penalty"] is not None for row in line)}
    maps = [name for name, line in known.items() if line[0]["role"] == "method"]
    maps.sort(key=lambda name: _total(known[name], "penalty"), reverse=True)
    return {
        "identity": known.get("identity"),
        "maps": [f"{name} {value_range([row['penalty'] for row in known[name]], '.3f')}" for name in maps],
        "alike": [f"{a} and {b}" for a, b in pairwise(maps) if _overlap(known[a], known[b])],
        "lost": [name for name in methods if name not in known],
    }


def _overlap(worse: list[Row], better: list[Row]) -> bool:
    """Tell whether the intervals of two penalties meet at any site."""
    return any(a["penalty_low"] <= b["penalty_high"] for a, b in zip(worse, better, strict=True))


def _measured(methods: dict[str, list[Row]], *columns: str) -> dict[str, list[Row]]:
    """Select the maps that have a value in these columns at every site."""
    return {
        name: line
        for name, line in methods.items()
        if line[0]["role"] == "method" and all(row.get(column) is not None for row in line for column in columns)
    }


def _closest(methods: dict[str, list[Row]], column: str) -> tuple[str, list[Row]] | None:
    """The map with the least error, and its rows; None of no maps."""
    return min(methods.items(), key=lambda item: _total(item[1], column), default=None)


def _total(line: list[Row], column: str) -> float:
    return sum(row[column] for row in line)


def report(meta: Row, rows: Sequence[Row]) -> Report:
    """Make the report from one row for each method, site, direction and kind of rows."""
    shown = with_short_names(rows)
    drawn = [name for name in FIGURES if any(row.get(DRAWN[name]) is not None for row in rows)]
    about = {**meta, "price_of_bijectivity": price_of_bijectivity(rows), "below_chance": below_chance(rows)}
    figures, said = {name: partial(FIGURES[name], shown) for name in drawn}, reading(shown).splitlines()
    return Report(
        "report", about, rows, figures=figures, screen=console_tables(shown), sentences=[*said, *left_out(meta)]
    )


def left_out(meta: Row) -> list[str]:
    """Say what was asked for but not measured."""
    missing = [f"Nothing was injected {direction}: {why}." for direction, why in meta.get("not_injected", {}).items()]
    return missing + [f"Left out, {name}: {why}" for name, why in meta.get("refusals", {}).items()]


def console_tables(rows: Sequence[Row]) -> list[Table]:
    """Make tables for each direction and kind of rows: methods down, sites across.

    Groups of columns are the penalty of language models, FVU, FVU on unseen types and on other text, FVU of the
    inverse, and the score. They stand side by side as far as they fit on a screen, and below each other where there are
    many sites. A group without numbers is left out.
    """
    tables = []
    for panel in panels_of(rows):
        pairs = site_pairs(panel)
        groups = [group for group in COLUMN_GROUPS if group != "penalty" or of_tokens(panel)]
        filled = [group for group in groups if any(row.get(group) is not None for row in panel)]
        count = math.ceil(len(filled) / max(1, MOST_NUMBERS_ABREAST // len(pairs)))
        together = [list(part) for part in np.array_split(filled, count)]
        tables += [_table(panel, pairs, panel_title(panel), groups) for groups in together]
    return tables


def _table(panel: list[Row], pairs: list[tuple[int, int]], title: str, groups: list[str]) -> Table:
    sites = {COLUMN_GROUPS[group][0] or score_heading(panel): [site_name(pair) for pair in pairs] for group in groups}
    table = site_table(title, ["method"], ["parameters"], sites)
    for name, own in grouped(panel, "method").items():
        line = {(row["site_x"], row["site_y"]): row for row in own}
        first = next(iter(line.values()))
        cells = [
            mark(_short(line.get(pair, first)[group], COLUMN_GROUPS[group][1]), line.get(pair, first))
            for group in groups
            for pair in pairs
        ]
        parameters = f"{first['parameters']:,}" if first["parameters"] else ""
        table.add_row(name, parameters, *cells, style={"ceiling": "green", "floor": "dim"}.get(first["role"]))
    return table


def _short(value: float | None, percent: bool) -> str:
    if value is None:
        return ""
    if percent:
        return f"{100 * value:.1f}"
    return f"{value:.0e}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def fvu_figure(rows: Sequence[Row]) -> Figure:
    """Draw FVU against site on a logarithmic scale: a line for each method, panels for each direction.

    Where they are known, FVU on the rows of unseen types and on another source of text follow below.
    """
    heights = [name for name in FVU_LABELS if name == "fvu" or any(row.get(name) is not None for row in rows)]
    styles = _styles(rows)
    parts = [part for panel in panels_of(rows) for part in _parts(panel, styles)]
    figure, axes = drawing.panels(len(heights) * len(parts), len(parts), drawing.PANEL, (1.9, 1.1), sharey=True)
    beyond: dict[str, None] = {}
    starts: set[str] = set()
    for axis, (height, part) in zip(axes, product(heights, parts), strict=True):
        for name, style, cells in part.lines:
            line = [row for row in cells if row is not None]
            shown, untrained = _fvu_line(axis, name, style, line, height)
            starts |= {name} if untrained else set()
            if not all(map(math.isfinite, shown)):
                beyond[f"{name} into {line[0]['model_y']}"] = None
        axis.axhline(1, color="0.6", linewidth=0.8, zorder=0)
        drawing.name_sites(axis, part.title if height == "fvu" else "", part.pairs)
        if part is parts[0]:
            axis.set_ylabel(FVU_LABELS[height])
    drawing.log_scale(axes)
    notes = [f"above {FVU_TOP:g}, off the scale: {', '.join(beyond)}"] if beyond else []
    notes += [f"{drawing.HOLLOW} ({', '.join(sorted(starts))})"] if starts else []
    drawing.dress(figure, axes, "\n".join(["site (layer)", *notes]), "")
    return figure


def _fvu_line(axis: Axes, name: str, style: drawing.Look, line: list[Row], height: str) -> tuple[list[float], bool]:
    """Draw one method. Return its values, NaN off the scale, and whether training did not improve it at some site."""
    values = [number(row.get(height)) for row in line]
    shown = [value if value < FVU_TOP else math.nan for value in values]
    axis.plot(range(len(line)), shown, label=name if any(map(math.isfinite, shown)) else None, **style)
    return shown, drawing.hollow_where_untrained(axis, range(len(line)), shown, line, style)


def penalty_figure(rows: Sequence[Row]) -> Figure:
    """Draw how much injection raises a language model's loss, with intervals and floors."""
    of_models = [panel for panel in panels_of(rows) if of_tokens(panel)]
    return _by_site(of_models, ("floor",), "penalty", "penalty of injection, nats a token")


def accuracy_figure(rows: Sequence[Row]) -> Figure:
    """Draw the task's score after injection, with intervals, between the ceiling and the floors."""
    scored = [panel for panel in panels_of(rows) if any(row["score"] is not None for row in panel)]
    return _by_site(scored, ("ceiling", "floor"), "score", f"after injection: {score_words(rows)}", 100)


def _by_site(shown: Sequence[list[Row]], roles: Sequence[str], column: str, up: str, scale: float = 1) -> Figure:
    """Draw a column against site; rows without a site are levels if they have one of `roles`."""
    styles = _styles([row for panel in shown for row in panel])
    each = []
    for panel in shown:
        without = [row for row in panel if row["site_x"] is None and row["role"] in roles and row[column] is not None]
        levels = [(row["method"], {"linewidth": 1, **LEVELS[row["method"]]}, row[column]) for row in without]
        each += [part._replace(levels=levels) for part in _parts(panel, styles)]
    return drawing.site_figure(each, column, up, scale)


def _parts(panel: list[Row], styles: dict[str, drawing.Look]) -> list[drawing.SitePanel]:
    """Draw a panel's lines in as few panels as can be read: closed forms, trained maps and floors."""
    methods = grouped(panel, "method")
    lines = {name: (name, style, methods[name]) for name, style in styles.items() if name in methods}
    kinds: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name, style, line in lines.values():
        kinds[FLOORS if line[0]["role"] == "floor" else CLOSED if style["linestyle"] == "--" else OTHERS].append(name)
    shares = drawing.shared_out(kinds.values())
    title, pairs = panel_title(panel), site_pairs(panel)
    if len(shares) == 1:
        return [drawing.SitePanel(title, pairs, list(lines.values()))]
    said = (" and ".join(kind for kind in KINDS if set(kinds[kind]) & set(share)) for share in shares)
    return [
        drawing.SitePanel(f"{title}\n{kind}", pairs, [lines[name] for name in share])
        for kind, share in zip(said, shares, strict=True)
    ]


def _styles(rows: Sequence[Row]) -> dict[str, drawing.Look]:
    """Say how to draw each method that has sites, in every panel: closed forms dashed, floors dotted."""
    roles = {row["method"]: row["role"] for row in rows if row["site_x"] is not None}
    solved = {row["method"] for row in rows if row.get("fit") == "closed form"}
    styles = drawing.method_looks(sorted(roles, key=lambda name: roles[name] == "floor"))
    for name in solved:
        if roles.get(name, "floor") != "floor":
            styles[name]["linestyle"] = "--"
    return styles


FIGURES = {"penalty": penalty_figure, "fvu": fvu_figure, "accuracy": accuracy_figure}
