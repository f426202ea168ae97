"""The report of carrying: what becomes of each artefact, and its scores where the texts have its labels."""

import math
from collections.abc import Sequence
from functools import partial
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aligners.reports.drawing import LOOKS, Look, dress, panels
from aligners.reports.names import (
    WORDS,
    fixed,
    interval_of,
    plain_number,
    site_name,
    with_interval,
    with_short_names,
)
from aligners.reports.report import Report, Row, distinct, grouped, mean, where
from aligners.reports.screen import SiteTable

SCORES: dict[str, Look] = LOOKS["carrying"]
SIDES = {
    "": "carried",
    "stale_": "stale",
}  # how an artefact reads the new model: what its columns begin with
MOST_NAMED = 4  # artefacts of one verdict that the first sentences name
PLACES = ".3f"  # of scores
HELD_OUT = "labelled held-out texts"  # of whose scores there are forecasts, too
AGREEMENT = (
    "Agreement (fidelity) is the AUROC against an artefact's own old decisions, "
    "whether these were right or wrong."
)


def report(
    meta: Row, rows: Sequence[Row], scores: Sequence[Row] = (), maps: Sequence[Row] = ()
) -> Report:
    """Make the report.

    Args:
        meta: what holds for all rows.
        rows: one for each artefact.
        scores: where the texts have its labels, one for each artefact and condition.
        maps: one for each artefact, site and map that was tried.
    """
    shown = sorted(with_short_names(rows), key=_urgency, reverse=True)
    screen = [_fates(shown), *([_scores(shown, scores)] if scores else []), _maps(maps)]
    figures = {"carrying": partial(figure, shown, scores)}
    tables = {"scores": scores, "maps": maps}
    said = [*_without_forecast(shown), *_forecasts(shown, scores)]
    first = lead(shown, scores)
    return Report(
        "carrying", meta, rows, tables, figures=figures, screen=screen, lead=first, sentences=said
    )


# ---------------------------------------------------------------------- what is said


def forecast(row: Row, side: str = "") -> float | None:
    """The score that is forecast; None where that on the old model is not known, as of earlier versions' rows, too."""
    value: float | None = row[f"{side}predicted"]
    return None if row["own_score"] is None else value


def loss(row: Row) -> float:
    """What an artefact loses at best, left as it is or carried: of its score or, where none is known, of agreement."""
    if forecast(row) is None:
        before, kept = 1.0, [row[f"{side}fidelity"] for side in SIDES]
    else:
        before, kept = row["own_score"], [forecast(row, side) for side in SIDES]
    known = [value for value in kept if value is not None]
    return before - max(known) if known else -1.0  # less than any


def _urgency(row: Row) -> tuple[float, bool]:
    """What is said first: what loses most and, of equals, what is not to be used."""
    return round(loss(row), 3), row["verdict"] == "do not use"


def lead(rows: Sequence[Row], scores: Sequence[Row]) -> str:
    """Say what becomes of the artefacts, those that lose most first.

    Args:
        rows: of the report, in this order.
        scores: likewise.
    """
    first, count = rows[0], len(rows)
    carried = (
        f"{count} artefacts of {first['model_x']} were"
        if count > 1
        else f"An artefact of {first['model_x']} was"
    )
    said = [
        f"{carried} carried to {first['model_y']} by maps that were fitted on {plain_number(first['n_fitted'])} texts "
        "without labels."
    ]
    for verdict, line in grouped(rows, "verdict").items():
        named = "; ".join(_fate(row) for row in line[:MOST_NAMED])
        more = f"; and {len(line) - MOST_NAMED} more" if len(line) > MOST_NAMED else ""
        said.append(f"{verdict.capitalize()}: {named}{more}.")
    return " ".join([*said, *_against_labels(rows, scores)])


def _fate(row: Row) -> str:
    """`tone (forecast 0.890 [0.870, 0.910] of 0.912, as it is 0.750)`, or its agreement where no score is known."""
    name, known = row["artefact"], forecast(row) is not None
    column = "predicted" if known else "fidelity"
    if row[column] is None:
        return str(name)
    what, own = (
        ("forecast", f" of {fixed(row['own_score'], PLACES)}") if known else ("agreement", "")
    )
    text = f"{what} {_with_ends(row, column)}{own}"
    stale = row[f"stale_{column}"]
    return (
        f"{name} ({text}, as it is {fixed(stale, PLACES)})"
        if stale is not None
        else f"{name} ({text})"
    )


def _against_labels(rows: Sequence[Row], scores: Sequence[Row]) -> list[str]:
    """The true scores: of one artefact with intervals, of several their means."""
    scored = [name for name in distinct(rows, "artefact") if where(scores, artefact=name)]
    if not scored:
        return []
    one = f"Against labels {scored[0]} has an AUROC of"
    said = one if len(scored) == 1 else f"Mean AUROC of {len(scored)} against labels is"
    conditions = {
        "native": "on the old model",
        "stale": "as they are" if len(scored) > 1 else "as it is",
    }
    conditions |= {name: name for name in ("carried", "trained anew")}
    parts = []
    for condition, words in conditions.items():
        of = where(scores, condition=condition)
        value = mean(of, "auroc", known=True) if of else math.nan
        if math.isnan(value):
            continue
        parts.append(
            f"{_with_ends(of[0], 'auroc') if len(of) == 1 else fixed(value, PLACES)} {words}"
        )
    return [f"{said} {', '.join(parts)}."] if parts else []


def _without_forecast(rows: Sequence[Row]) -> list[str]:
    """Which artefacts have no forecast, and how they get one."""
    names = [
        row["artefact"] for row in rows if forecast(row) is None and row["fidelity"] is not None
    ]
    if not names:
        return []
    listed = ", ".join(names[:MOST_NAMED]) + (
        f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    )
    return [
        f"{AGREEMENT} No score is forecast of {listed}: their scores on the old model are not known. Write what you "
        'measured into artefact.json, `"score": {"metric": "auroc", "value": 0.9, "n": 500}`, or give texts with their '
        "labels."
    ]


def _forecasts(rows: Sequence[Row], scores: Sequence[Row]) -> list[str]:
    """How far forecasts are from the true scores, where there are both."""
    errors = []
    for row in rows:
        for score in where(scores, artefact=row["artefact"], condition="carried"):
            expected = forecast(row)
            if expected is not None and score["auroc"] is not None:
                errors.append(expected - score["auroc"])
    if not errors:
        return []
    far = [abs(error) for error in errors]
    if len(far) == 1:
        off = f"The forecast of the carried score is {errors[0]:+z.3f} from the true one"
    else:
        off = f"Forecasts of carried scores are off by {fmean(far):.3f} on average, at most {max(far):.3f}"
    measured = any(row.get("own_score_of") == HELD_OUT for row in rows)
    return [off + ("; both are of the same held-out texts." if measured else ".")]


def _with_ends(row: Row, column: str) -> str:
    return fixed(row[column], PLACES) + interval_of(row, column, PLACES)


def artefact_card(row: Row, scores: Sequence[Row], meta: Row, *, through: bool) -> str:
    """The card of a carried artefact, as Markdown.

    Args:
        row: of the report.
        scores: its own, if the texts have its labels.
        meta: of the report.
        through: whether the map stays beside it.
    """
    text = meta["text"]
    lines = [
        f"# {row['artefact']}",
        "",
        f"A {row['kind']} that reads {row['model_y']} at site {row['site_y']}, rows: {row['rows']}. It was carried, "
        f"and not trained, from one of {row['model_x']} at site {row['site_x']}.",
        "",
        f"- Verdict: **{row['verdict']}**.",
        f"- Map: {row['map']}, fitted on {row['fitted_on']} of {row['n_fitted']} texts of `{text['source']}` without "
        f"labels, chosen on {text['n_texts']['validation']} other texts out of {', '.join(meta['maps'])}. It misses "
        f"{plain_number(row['error'])} of the variance of the answers.",
    ]
    if row["fidelity"] is not None:
        lines.append(
            f"- Agreement with its old answers on {row['n_texts']} held-out texts: AUROC {_with_ends(row, 'fidelity')} "
            f"against its own old decisions, rank correlation {_with_ends(row, 'rank_correlation')}. This says nothing "
            "of whether the old answers were right."
        )
    if forecast(row) is not None:
        stale = forecast(row, "stale_")
        left = (
            ""
            if stale is None
            else f"; {_with_ends(row, 'stale_predicted')} if it is left as it is"
        )
        lines.append(
            f"- Forecast: AUROC {_with_ends(row, 'predicted')}, from the {fixed(row['own_score'], PLACES)} that "
            f"{row['own_score_of']} gave on {row['model_x']}{left}."
        )
    for score in scores:
        if score["auroc"] is not None:
            told = f"- AUROC against the labels of {score['n_texts']} texts, {score['condition']}"
            lines.append(f"{told}: {_with_ends(score, 'auroc')}.")
    if through:
        lines.append(
            "- `map.safetensors` holds the map, which states go through before they are read: `read_artefacts` of "
            "aligners.api applies it."
        )
    if row["kind"] == "direction":
        lines.append(
            "- `vector`, pushed forward, is the one to add to states; `reading` with `offset`, pulled back, the one to "
            "read them by."
        )
    if row["kind"] == "dictionary":
        lines.append("- The encoder was pulled back through the map, the decoder pushed forward.")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------- tables


def _fates(rows: Sequence[Row]) -> SiteTable:
    """What is said of each artefact from its answers, those that lose most first."""
    said = WORDS["carrying"]
    title = (
        f"{rows[0]['model_x']} → {rows[0]['model_y']}: agreement with old answers, and forecasts"
    )
    headings = [
        f"{side}\n{heading}" for side in ("carried", "as it is") for heading in said.values()
    ]
    names = ["artefact", "kind", "site", "map", "verdict"]
    table = SiteTable(
        f"{title}, on {rows[0]['n_texts']} held-out texts", names, ["score on old", *headings], {}
    )
    for row in rows:
        own = "" if row["own_score"] is None else fixed(row["own_score"], PLACES)
        cells = []
        for side in SIDES:
            for name in said:
                known = name != "predicted" or forecast(row, side) is not None
                cells.append(with_interval(row, side + name, PLACES) if known else "")
        site = site_name((row["site_x"], row["site_y"]))
        map_ = f"{row['map']}, {row['fitted_on']}"
        table.add_row(row["artefact"], row["kind"], site, map_, row["verdict"], own, *cells)
    return table


def _scores(rows: Sequence[Row], scores: Sequence[Row]) -> SiteTable:
    """AUROC and accuracy against labels, a line for each artefact."""
    groups = {heading: list(SCORES) for heading in ("AUROC", "accuracy")}
    table = SiteTable("Against the labels of held-out texts", ["artefact"], [], groups)
    for name in distinct(rows, "artefact"):
        of = {row["condition"]: row for row in where(scores, artefact=name)}
        if of:
            cells = [
                with_interval(of.get(c, {}), column, PLACES)
                for column in ("auroc", "accuracy")
                for c in SCORES
            ]
            table.add_row(name, *cells)
    return table


def _maps(maps: Sequence[Row]) -> SiteTable:
    """How much of an artefact's answers each map misses on validation texts, at its best site."""
    names = distinct(maps, "map", "fitted_on")
    title = "Share of the variance of an artefact's answers that each map misses, validation texts, best site"
    table = SiteTable(title, ["artefact"], [], {"": [f"{name}, {rows}" for name, rows in names]})
    for artefact in distinct(maps, "artefact"):
        errors = [
            [row["error"] for row in where(maps, artefact=artefact, map=m, fitted_on=on)]
            for m, on in names
        ]
        table.add_row(artefact, *(f"{min(values):.4f}" if values else "" for values in errors))
    return table


# ---------------------------------------------------------------------- the figure


def figure(rows: Sequence[Row], scores: Sequence[Row]) -> Figure:
    """Draw the agreement of each artefact with its old answers and, beside it, true scores and forecasts."""
    scored = bool(scores) or any(forecast(row) is not None for row in rows)
    drawn, axes = panels(1 + scored, 2, (4.4, 0.9 + 0.6 * len(rows)), (2.0, 0.4), sharey=True)
    for place, row in enumerate(rows):
        for side, name in SIDES.items():
            _point(axes[0], row, f"{side}fidelity", place, name, SCORES[name])
        for side, name in SIDES.items() if scored else ():
            if forecast(row, side) is not None:
                hollow = {
                    **SCORES[name],
                    "marker": "D",
                    "markersize": 8,
                    "markerfacecolor": "none",
                    "alpha": 0.7,
                }
                _point(axes[1], row, f"{side}predicted", place + 0.12, f"forecast, {name}", hollow)
        for condition, look in SCORES.items():
            for score in where(scores, artefact=row["artefact"], condition=condition):
                _point(axes[1], score, "auroc", place - 0.12, condition, {**look, "markersize": 5})
    titles = ("agreement with the old decisions", "score against labels, and forecast")
    for axis, title in zip(axes, titles, strict=False):
        axis.axvline(0.5, color="0.8", linewidth=0.8, zorder=0)
        axis.set_title(title, fontsize=9)
    axes[0].set_yticks(range(len(rows)), [f"{row['artefact']}\n{row['verdict']}" for row in rows])
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    dress(drawn, axes, "AUROC", "", f"{rows[0]['model_x']} → {rows[0]['model_y']}")
    return drawn


def _point(axis: Axes, row: Row, column: str, place: float, name: str, look: Look) -> None:
    """A value with its interval."""
    value, low, high = (row[column + end] for end in ("", "_low", "_high"))
    if value is not None:
        bars = None if low is None else [[max(value - low, 0)], [max(high - value, 0)]]
        axis.errorbar(
            [value], [place], xerr=bars, label=name, linestyle="none", elinewidth=0.9, **look
        )
