"""The report of stitching: penalties and scores by route, method and site pair, and the findings in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations

from matplotlib.figure import Figure
from rich.table import Table

from aligners.fitting.outcomes import is_trained, mark, what_did_not_train
from aligners.injection.scoring.pair_intervals import OVER_MODELS, over_pairs
from aligners.reports.names import score_heading, score_words, short_names, site_name, with_short_names
from aligners.reports.report import Report, Row, distinct, grouped, where
from aligners.reports.runs.stitching import figures
from aligners.reports.screen import site_table
from aligners.reports.templates import sentences

Groups = Mapping[str, Sequence[str]] | None
MOST_SITES_TOGETHER = 3  # penalty and accuracy side by side
LOST = "lost × 100"  # of the score, if lines are means over routes
MOST_SITES_ABREAST = {"penalty": 6, "score": 12}  # either alone
SMALL = 0.01  # nats, and hundredths of the score


def report(meta: Row, rows: Sequence[Row], curves: Sequence[Row] = (), groups: Groups = None) -> Report:
    """Make the report from rows and learning curves.

    Args:
        meta: what holds for all rows.
        rows: one for each route, method and site pair, and one "native" for each route.
        curves: one for each route, method, site pair and step.
        groups: of models. With groups, or many models, means over pairs of models are shown.
    """
    tables = {"pairs": over_pairs(rows, groups) if figures.averaged(rows, groups) else [], "curves": curves}
    drawn, screen = _figures(rows, curves, groups), stitching_tables(rows, groups)
    note = f"±: half of the {figures.what_intervals_are(rows, groups)}"
    said = [*findings(rows, groups), *what_did_not_train(with_short_names(rows))]
    return Report("stitching", meta, rows, tables, figures=drawn, screen=screen, note=note, sentences=said)


def _figures(rows: Sequence[Row], curves: Sequence[Row], groups: Groups) -> dict[str, Callable[[], Figure]]:
    drawn: dict[str, Callable[[], Figure]] = {
        "penalty": partial(figures.penalty_figure, rows, groups),
        "accuracy": partial(figures.accuracy_figure, rows, groups),
    }
    if figures.is_grid(rows):
        drawn["map"] = partial(figures.penalty_map, rows, groups)
    trained = grouped(curves, "method")
    for method, own in trained.items():
        drawn["curves" if len(trained) == 1 else f"curves_{method}"] = partial(figures.curve_figure, own, groups)
    return drawn


def stitching_tables(rows: Sequence[Row], groups: Groups = None) -> list[Table]:
    """Make tables with routes down and sites across: the penalty ± half its interval's width, and the task's score.

    With groups, or many models, a line is the mean over a group's routes and shows how much of the score is lost. Many
    sites are spread over several tables; of a grid, only the matching sites are shown.
    """
    pairs, lines = figures.matching_pairs(rows), figures.lines_of(rows, groups)
    mean = figures.averaged(rows, groups)
    units = {"penalty": "penalty", "score": LOST if mean else score_heading(rows)}
    blocks = [(list(units.values()), pairs)]
    if len(pairs) > MOST_SITES_TOGETHER:
        blocks = [
            ([units[name]], pairs[start : start + most])
            for name, most in MOST_SITES_ABREAST.items()
            for start in range(0, len(pairs), most)
        ]
    tables = []
    for method in figures.methods_of(rows):
        about = next(row for row in rows if row["method"] == method)
        title = method + (f", {about['fit']}" if about["fit"] not in (None, "none") else "")
        title += f", {about['parameters']:,} parameters a site" if about["parameters"] else ""
        title += ", matching sites" if figures.is_grid(rows) else ""
        tables += [_table(lines, method, shown, title, columns) for columns, shown in blocks]
    return tables


def _table(
    lines: Sequence[figures.Line], method: str, pairs: Sequence[tuple[int, int]], title: str, columns: Sequence[str]
) -> Table:
    whole = next((column for column in columns if column not in ("penalty", LOST)), None)
    sites = [site_name(pair) for pair in pairs]
    across = {f"{column}, nats" if column == "penalty" else column: sites for column in columns}
    table = site_table(title, ["from → into"], [] if whole is None else [f"native\n{whole}"], across)
    for line in lines:
        cells = {(row["site_x"], row["site_y"]): row for row in line.rows if row["method"] == method}
        if not cells:
            continue
        native = [f"{100 * row['score']:.1f}" for row in line.rows if row["method"] == "native"]
        texts = [_cell(cells.get(pair), column) for column in columns for pair in pairs]
        table.add_row(line.name, *(native if whole is not None else []), *texts, style="dim" if line.same else None)
    return table


def _cell(row: Row | None, column: str) -> str:
    if row is None:
        return ""
    if column == "penalty":
        if row["penalty"] is None:
            return "overflow"
        digits = 3 if abs(row["penalty"]) < 1 else 2
        half = (row["penalty_high"] - row["penalty_low"]) / 2
        return mark(f"{row['penalty']:z.{digits}f}", row) + f" ±{half:.{digits}f}"
    value = row["score_penalty" if column == LOST else "score"]
    return "" if value is None else mark(f"{100 * value:z.1f}", row)


def findings(rows: Sequence[Row], groups: Mapping[str, Sequence[str]] | None = None) -> list[str]:
    """Write a sentence for each finding on each method.

    They say which direction costs more, whether models stitched to themselves lose anything, how much of the targets'
    score is kept and, with groups, which routes cost more. Of a route that overflows they say only that it does, and
    nothing of a layer that is not trained.

    Args:
        rows: of all routes.
        groups: see `aligners.injection.scoring.pair_intervals.over_pairs`.
    """
    methods = []
    for name in figures.methods_of(rows):
        own = [row for row in where(rows, method=name) if is_trained(row)]
        if not own:
            continue
        sound = [row for row in own if row["penalty"] is not None]
        others = where(sound, same_model=False)
        floor = own[0]["role"] == "floor"
        methods.append({
            "name": name,
            "overflowed": len(own) - len(sound),
            "places": _places(own),
            "cost": others if floor else [],
            "directions": [] if floor or figures.averaged(rows, groups) else list(_directions(sound)),
            **(_accuracy(others) if others and not floor else {"kept": None}),
            **(_baselines(sound) if not floor else {"same": []}),
            "groups": [] if groups is None else list(_between_groups(own, groups)),
        })  # fmt: skip
    return sentences("stitching", methods=methods, small=SMALL, score=score_words(rows))


def _directions(rows: Sequence[Row]) -> Iterator[Row]:
    """Of each pair of models which direction costs more, comparing X's site l into Y's m with Y's m into X's l."""
    names = short_names(row[f"model_{side}"] for row in rows for side in "xy")
    cells = {(row["model_x"], row["model_y"], row["site_x"], row["site_y"]): row for row in rows}
    pairs: dict[tuple[str, str], list[tuple[Row, Row]]] = {}
    for (x, y, i, j), row in cells.items():
        back = cells.get((y, x, j, i))
        if x != y and back is not None and (y, x) not in pairs:
            pairs.setdefault((x, y), []).append((row, back))
    for (x, y), both in pairs.items():
        if _dearer(both) < _dearer([(b, a) for a, b in both]):
            x, y, both = y, x, [(b, a) for a, b in both]
        yield {
            "x": names[x],
            "y": names[y],
            "dearer": _dearer(both),
            "places": len(both),
            "pairs": any(row["site_x"] != row["site_y"] for row, _ in both),
            "beyond": sum(a["penalty_low"] > b["penalty_high"] for a, b in both),
            "against": sum(b["penalty_low"] > a["penalty_high"] for a, b in both),
        }


def _dearer(pairs: Sequence[tuple[Row, Row]]) -> int:
    return sum(a["penalty"] > b["penalty"] for a, b in pairs)


def _baselines(rows: Sequence[Row]) -> Row:
    """What stitching a model to itself costs, and where different models cost more."""
    same = [row for row in where(rows, same_model=True) if row["site_x"] == row["site_y"]]
    base = {(row["model_y"], row["site_y"]): row["penalty_high"] for row in same}
    others = [row for row in where(rows, same_model=False) if (row["model_y"], row["site_y"]) in base]
    return {
        "same": same,
        "above": sum(row["penalty"] > SMALL for row in same),
        "same_places": _places(same),
        "compared": len(others),
        "compared_places": _places(others),
        "dearer": sum(row["penalty_low"] > base[row["model_y"], row["site_y"]] for row in others),
    }


def _accuracy(others: Sequence[Row]) -> Row:
    """Where a different model keeps the target's score, and where most of it is lost."""
    names = short_names(row[f"model_{side}"] for row in others for side in "xy")
    worst = max(others, key=lambda row: row["score_penalty"])
    return {
        "kept": sum(row["score_penalty"] <= SMALL for row in others),
        "other_places": _places(others),
        "lost": worst["score_penalty"],
        "route": f"{names[worst['model_x']]} to {names[worst['model_y']]}",
        "site": site_name((worst["site_x"], worst["site_y"])),
    }


def _between_groups(rows: Sequence[Row], groups: Mapping[str, Sequence[str]]) -> Iterator[Row]:
    """Compare routes from one group into another with those within either group."""
    lines = {
        line.name: {(row["site_x"], row["site_y"]): row for row in line.rows if row["penalty"] is not None}
        for line in figures.lines_of(rows, groups)
    }
    for a, b in permutations(groups, 2):
        within = [lines[name] for name in (f"{a}-to-{a}", f"{b}-to-{b}") if name in lines]
        between = lines.get(f"{a}-to-{b}", {})
        both = [(between[place], [own[place] for own in within]) for place in between
                if within and all(place in own for own in within)]  # fmt: skip
        if both:
            over_models = all(row["interval"] == OVER_MODELS for one, own in both for row in (one, *own))
            clear = sum(all(one["penalty_low"] > other["penalty_high"] for other in own) for one, own in both)
            yield {
                "a": a,
                "b": b,
                "places": len(both),
                "dearer": sum(all(one["penalty"] > other["penalty"] for other in own) for one, own in both),
                "beyond": clear if over_models else None,
            }


def _places(rows: Sequence[Row]) -> str:
    routes = len(distinct(rows, "model_x", "model_y"))
    return f"{len(rows)} places ({routes} {'route' if routes == 1 else 'routes'})"
