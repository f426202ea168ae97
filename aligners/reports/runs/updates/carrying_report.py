"""The report of carrying: the fate of each artefact, and its scores if the texts have its labels."""

from collections.abc import Sequence
from functools import partial
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aligners.reports.drawing import LOOKS, Look, dress, panels
from aligners.reports.names import (
    WORDS,
    blank,
    fixed,
    in_words,
    plain_number,
    route_name,
    site_of,
    with_interval,
    with_short_names,
)
from aligners.reports.report import (
    Report,
    Row,
    by_column,
    distinct,
    grouped,
    known,
    mean,
    number,
    values,
    where,
)
from aligners.reports.screen import SiteTable

SCORES: dict[str, Look] = LOOKS["carrying"]
SIDES = {
    "": "carried",
    "stale_": "stale",
}  # what columns begin with -> how the new model is read
MOST_NAMED = 4  # artefacts of one verdict that the first sentences name
PLACES = ".3f"  # of scores
HELD_OUT = "labelled held-out texts"  # of whose scores there are forecasts, too


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
    screen = [_fates(shown)]
    if scores:
        screen.append(_scores(shown, scores))
    return Report(
        "carrying",
        meta,
        rows,
        {"scores": scores, "maps": maps},
        figures={"carrying": partial(figure, shown, scores)},
        screen=[*screen, _maps(maps)],
        lead=lead(shown, scores),
        sentences=_without_forecast(shown) + _forecasts(shown, scores),
    )


# ---------------------------------------------------------------------- what is said


def forecast(row: Row, side: str = "") -> float | None:
    """Return the forecast of a score; None if the score on the old model is unknown, as in rows of earlier versions."""
    value: float | None = row[f"{side}predicted"]
    return None if row["own_score"] is None else value


def loss(row: Row) -> float:
    """Return what an artefact loses at best, unchanged or carried: of its score or, if unknown, of agreement."""
    column = "predicted"
    before = row["own_score"]
    if forecast(row) is None:
        column, before = "fidelity", 1.0
    kept = [number(row[side + column]) for side in SIDES]
    if np.isnan(kept).all():
        return -1.0  # less than any
    return float(before - np.nanmax(kept))


def _urgency(row: Row) -> tuple[float, bool]:
    """Return a sorting key: what loses most comes first and, among equals, what should not be used."""
    return round(loss(row), 3), row["verdict"] == "do not use"


def lead(rows: Sequence[Row], scores: Sequence[Row]) -> str:
    """Say what becomes of the artefacts, those that lose most first.

    Args:
        rows: rows of the report, in this order.
        scores: likewise.
    """
    first = rows[0]
    count = len(rows)
    carried = f"{count} artefacts of {first['model_x']} were"
    if count == 1:
        carried = f"An artefact of {first['model_x']} was"
    texts = f"{plain_number(first['n_fitted'])} texts without labels"
    said = (
        f"{carried} carried to {first['model_y']} by maps that were fitted on {texts}."
    )
    for verdict, line in grouped(rows, "verdict").items():
        named = "; ".join(map(_fate, line[:MOST_NAMED]))
        if len(line) > MOST_NAMED:
            named += f"; and {len(line) - MOST_NAMED} more"
        said += f" {verdict.capitalize()}: {named}."
    return said + _against_labels(rows, scores)


def _fate(row: Row) -> str:
    """`tone (forecast 0.890 [0.870, 0.910] of 0.912, as it is 0.750)`, or its agreement where no score is known."""
    what, column, own = "agreement", "fidelity", ""
    if forecast(row) is not None:
        what = "forecast"
        column = "predicted"
        own = f" of {fixed(row['own_score'], PLACES)}"
    if row[column] is None:
        return str(row["artefact"])
    text = f"{what} {in_words(row, column, PLACES)}{own}"
    if row[f"stale_{column}"] is not None:
        text += f", as it is {fixed(row[f'stale_{column}'], PLACES)}"
    return f"{row['artefact']} ({text})"


def _against_labels(rows: Sequence[Row], scores: Sequence[Row]) -> str:
    """State the scores against labels: for one artefact with intervals, for several their means."""
    scored = [
        name for name in distinct(rows, "artefact") if where(scores, artefact=name)
    ]
    words = {"native": "on the old model", "stale": "as they are"}
    if len(scored) == 1:
        words["stale"] = "as it is"
    parts = []
    for condition in ("native", "stale", "carried", "trained anew"):
        line = known(where(scores, condition=condition), "auroc")
        if line:
            score = fixed(mean(line, "auroc"), PLACES)
            if len(line) == 1:
                score = in_words(line[0], "auroc", PLACES)
            parts.append(f"{score} {words.get(condition, condition)}")
    if not parts:
        return ""
    who = f"Mean AUROC of {len(scored)} against labels is"
    if len(scored) == 1:
        who = f"Against labels {scored[0]} has an AUROC of"
    return f" {who} {', '.join(parts)}."


def _without_forecast(rows: Sequence[Row]) -> list[str]:
    """Say which artefacts have no forecast, and how they get one."""
    names = []
    for row in known(rows, "fidelity"):
        if forecast(row) is None:
            names.append(row["artefact"])
    if not names:
        return []
    listed = ", ".join(names[:MOST_NAMED])
    if len(names) > MOST_NAMED:
        listed += f" and {len(names) - MOST_NAMED} more"
    return [
        "Agreement (fidelity) is the AUROC against an artefact's own old decisions, whether these were right or wrong. "
        f"No score is forecast of {listed}: their scores on the old model are not known. Write what you "
        'measured into artefact.json, `"score": {"metric": "auroc", "value": 0.9, "n": 500}`, or give texts with their '
        "labels."
    ]


def _forecasts(rows: Sequence[Row], scores: Sequence[Row]) -> list[str]:
    """Say how far forecasts are from the measured scores, where there are both."""
    errors = []
    for row in rows:
        expected = forecast(row)
        carried = where(scores, artefact=row["artefact"], condition="carried")
        for score in known(carried, "auroc"):
            if expected is not None:
                errors.append(expected - score["auroc"])
    if not errors:
        return []
    far = list(map(abs, errors))
    off = f"Forecasts of carried scores are off by {fmean(far):.3f} on average, at most {max(far):.3f}"
    if len(far) == 1:
        off = (
            f"The forecast of the carried score is {errors[0]:+z.3f} from the true one"
        )
    if any(row.get("own_score_of") == HELD_OUT for row in rows):
        off += "; both are of the same held-out texts"
    return [f"{off}."]


def artefact_card(row: Row, scores: Sequence[Row], meta: Row, *, through: bool) -> str:
    """Return the card of a carried artefact, as Markdown.

    Args:
        row: row of the report.
        scores: its own, if the texts have its labels.
        meta: of the report.
        through: whether the map stays beside it.
    """
    text = meta["text"]
    said = [
        f"Verdict: **{row['verdict']}**.",
        f"Map: {row['map']}, fitted on {row['fitted_on']} of {row['n_fitted']} texts of `{text['source']}` without "
        f"labels, chosen on {text['n_texts']['validation']} other texts out of {', '.join(meta['maps'])}. It misses "
        f"{plain_number(row['error'])} of the variance of the answers.",
    ]
    if row["fidelity"] is not None:
        agreement = in_words(row, "fidelity", PLACES)
        ranks = in_words(row, "rank_correlation", PLACES)
        said.append(
            f"Agreement with its old answers on {row['n_texts']} held-out texts: AUROC {agreement} against its own old "
            f"decisions, rank correlation {ranks}. This says nothing of whether the old answers were right."
        )
    if forecast(row) is not None:
        expected = in_words(row, "predicted", PLACES)
        own = fixed(row["own_score"], PLACES)
        told = f"Forecast: AUROC {expected}, from the {own} that {row['own_score_of']} gave on {row['model_x']}"
        if forecast(row, "stale_") is not None:
            told += (
                f"; {in_words(row, 'stale_predicted', PLACES)} if it is left as it is"
            )
        said.append(f"{told}.")
    for score in known(scores, "auroc"):
        texts = f"the labels of {score['n_texts']} texts, {score['condition']}"
        said.append(f"AUROC against {texts}: {in_words(score, 'auroc', PLACES)}.")
    if through:
        said.append(
            "`map.safetensors` holds the map, which states go through before they are read: `read_artefacts` of "
            "aligners.api applies it."
        )
    if row["kind"] == "direction":
        said.append(
            "`vector`, pushed forward, is the one to add to states; `reading` with `offset`, pulled back, the one to "
            "read them by."
        )
    if row["kind"] == "dictionary":
        said.append(
            "The encoder was pulled back through the map, the decoder pushed forward."
        )
    card = (
        f"# {row['artefact']}\n\n"
        f"A {row['kind']} that reads {row['model_y']} at site {row['site_y']}, rows: {row['rows']}. It was carried, "
        f"and not trained, from one of {row['model_x']} at site {row['site_x']}.\n\n"
    )
    return card + "".join(f"- {line}\n" for line in said)


# ---------------------------------------------------------------------- tables


def _fates(rows: Sequence[Row]) -> SiteTable:
    """Summarise each artefact by its answers, those that lose most first."""
    said = WORDS["carrying"]
    texts = f"on {rows[0]['n_texts']} held-out texts"
    title = f"{route_name(rows[0])}: agreement with old answers, and forecasts, {texts}"
    columns = ["score on old"]
    for side in ("carried", "as it is"):
        columns += [f"{side}\n{heading}" for heading in said.values()]
    names = ["artefact", "kind", "site", "map", "verdict"]
    table = SiteTable(title, names, columns, {})
    for row in rows:
        map_ = f"{row['map']}, {row['fitted_on']}"
        cells = [row["artefact"], row["kind"], site_of(row), map_, row["verdict"]]
        cells.append(blank(row["own_score"], PLACES))
        for side in SIDES:
            for name in said:
                text = with_interval(row, side + name, PLACES)
                if name == "predicted" and forecast(row, side) is None:
                    text = ""
                cells.append(text)
        table.add_row(*cells)
    return table


def _scores(rows: Sequence[Row], scores: Sequence[Row]) -> SiteTable:
    """Make the table of AUROC and accuracy against labels, with a line for each artefact."""
    groups = {"AUROC": list(SCORES), "accuracy": list(SCORES)}
    table = SiteTable("Against the labels of held-out texts", ["artefact"], [], groups)
    for name in distinct(rows, "artefact"):
        conditions = by_column(where(scores, artefact=name), "condition")
        cells = []
        for column in ("auroc", "accuracy"):
            for condition in SCORES:
                cells.append(
                    with_interval(conditions.get(condition, {}), column, PLACES)
                )
        if conditions:
            table.add_row(name, *cells)
    return table


def _maps(maps: Sequence[Row]) -> SiteTable:
    """Make the table of what each map misses of an artefact's answers on validation texts, at its best site."""
    names = distinct(maps, "map", "fitted_on")
    headings = [f"{name}, {rows}" for name, rows in names]
    title = "Share of the variance of an artefact's answers that each map misses, validation texts, best site"
    table = SiteTable(title, ["artefact"], [], {"": headings})
    for artefact in distinct(maps, "artefact"):
        cells = []
        for name, rows in names:
            line = where(maps, artefact=artefact, map=name, fitted_on=rows)
            cells.append(blank(min(values(line, "error"), default=None), ".4f"))
        table.add_row(artefact, *cells)
    return table


# ---------------------------------------------------------------------- the figure


def figure(rows: Sequence[Row], scores: Sequence[Row]) -> Figure:
    """Draw the agreement of each artefact with its old answers and, beside it, true scores and forecasts."""
    scored = bool(scores) or any(forecast(row) is not None for row in rows)
    size = (4.4, 0.9 + 0.6 * len(rows))
    drawn, axes = panels(1 + scored, 2, size, (2.0, 0.4), sharey=True)
    _agreements(axes[0], rows)
    if scored:
        for place, row in enumerate(rows):
            own = where(scores, artefact=row["artefact"])
            _beside_labels(axes[1], row, own, place)
    titles = ("agreement with the old decisions", "score against labels, and forecast")
    for axis, title in zip(axes, titles, strict=False):
        axis.axvline(0.5, color="0.8", linewidth=0.8, zorder=0)
        axis.set_title(title, fontsize=9)
    dress(drawn, axes, "AUROC", "", route_name(rows[0]))
    return drawn


def _agreements(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw agreements with old answers, each artefact beside its name and verdict, the first on top."""
    for place, row in enumerate(rows):
        for side, name in SIDES.items():
            _point(axis, row, f"{side}fidelity", place, name, SCORES[name])
    names = [f"{row['artefact']}\n{row['verdict']}" for row in rows]
    axis.set_yticks(range(len(rows)), names)
    axis.set_ylim(len(rows) - 0.5, -0.5)


def _beside_labels(axis: Axes, row: Row, scores: Sequence[Row], place: int) -> None:
    """Draw the forecasts of an artefact hollow, and below them its scores against labels."""
    hollow = {"marker": "D", "markersize": 8, "markerfacecolor": "none", "alpha": 0.7}
    for side, name in SIDES.items():
        if forecast(row, side) is not None:
            look = {**SCORES[name], **hollow}
            column = f"{side}predicted"
            _point(axis, row, column, place + 0.12, f"forecast, {name}", look)
    for condition, colours in SCORES.items():
        look = {**colours, "markersize": 5}
        for score in where(scores, condition=condition):
            _point(axis, score, "auroc", place - 0.12, condition, look)


def _point(
    axis: Axes, row: Row, column: str, place: float, name: str, look: Look
) -> None:
    """Draw a value with its interval."""
    value = row[column]
    low = row[f"{column}_low"]
    high = row[f"{column}_high"]
    if value is None:
        return
    bars = None
    if low is not None:
        bars = [[max(value - low, 0)], [max(high - value, 0)]]
    options: Look = {"label": name, "linestyle": "none", "elinewidth": 0.9, **look}
    axis.errorbar([value], [place], xerr=bars, **options)
