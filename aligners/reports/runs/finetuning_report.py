"""The report of a fine-tuning: every classifier, and a summary by variant."""

from collections.abc import Collection, Sequence
from functools import partial
from operator import itemgetter
from statistics import fmean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aligners.errors import finite
from aligners.reports.drawing import MODEL_COLOURS, Look, panels
from aligners.reports.names import (
    WORDS,
    aligned,
    blank,
    counted,
    fixed,
    floor_words,
    plain_score,
    score_form,
    score_heading,
    score_in_words,
    score_words,
)
from aligners.reports.report import (
    Report,
    Row,
    distinct,
    grouped,
    known,
    number,
    numbers,
    values,
    where,
)
from aligners.reports.screen import SiteTable

CURVE_FROM = 3  # numbers of blocks; fewer stand side by side
UNFROZEN = -1  # where Merchant et al. put the model with nothing frozen
ACROSS = WORDS["finetuning"]


def report(meta: Row, rows: Sequence[Row]) -> Report:
    """Make the report from one row for each finished classifier."""
    majority = meta["majority_score"]
    return Report(
        "finetuning",
        meta,
        rows,
        {"summary": summarise(rows)},
        figures={"finetuning": partial(finetuning_figure, rows, majority)},
        screen=[finetuning_table(rows, majority)],
        lead=lead(rows, majority),
    )


def lead(rows: Sequence[Row], majority: float | None) -> str:
    """Say with which variant the score is highest, and with which it is lowest.

    Args:
        rows: rows of the report.
        majority: score of always giving the same answer; None: there is none.
    """
    summary = summarise(rows)
    classifiers = counted(len(rows), "classifier")
    variants = counted(len(summary), "variant")
    were = "was" if len(rows) == 1 else "were"
    texts = f"{rows[0]['n_texts']:,} held-out texts"
    said = f"{classifiers} of {variants} {were} fine-tuned and scored on {texts}."
    scored = known(summary, "score")
    if not scored:
        return f"{said} No score is a number."
    best = max(scored, key=itemgetter("score"))
    worst = min(scored, key=itemgetter("score"))
    name = plain_score(rows).capitalize()
    if best["variant"] == worst["variant"]:
        said += f" {name} is {_score(best, rows)}"
    else:
        lowest = f"lowest with {worst['variant']}, {_score(worst, rows)}"
        said += f" {name} is highest with {best['variant']}, {_score(best, rows)}, and {lowest}"
    if majority is not None:
        said += (
            f"; always giving the same answer gives {fixed(majority, score_form(rows))}"
        )
    return f"{said}."


def _score(line: Row, rows: Sequence[Row]) -> str:
    """Return the mean score of a variant ± its deviation over runs; for one run, the score with its interval."""
    if line["score_sd"] is None:
        return score_in_words(where(rows, variant=line["variant"])[0])
    form = score_form(rows)
    spread = f"(± {fixed(line['score_sd'], form)} over {line['n']} runs)"
    return f"{fixed(line['score'], form)} {spread}"


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Summarise each variant in a row: means over seeds and bases, and standard deviations of score and accuracy."""
    summary = []
    for variant, runs in grouped(rows, "variant").items():
        first = runs[0]
        row = {
            "variant": variant,
            "kind": first["kind"],
            "count": first["count"],
            "n": len(runs),
        }
        row |= {"score_name": first["score_name"], **_spread(runs, "score")}
        row |= _spread(runs, "accuracy")
        for column in ("loss", "seconds"):
            row[column] = finite(fmean(numbers(runs, column)))
        summary.append(row | {"trained": first["trained"]})
    return summary


def _spread(rows: Sequence[Row], column: str) -> Row:
    """Return the mean and standard deviation of a column, or None if some row lacks it."""
    found = values(rows, column)
    if None in found:
        return {column: None, f"{column}_sd": None}
    return {
        column: fmean(found),
        f"{column}_sd": stdev(found) if len(found) > 1 else None,
    }


def finetuning_table(rows: Sequence[Row], majority: float | None) -> SiteTable:
    """Make a table of scores by variant; the last line is the majority class, or the mean number, if there is one."""
    words = score_words(rows)
    title = f"{words[0].upper()}{words[1:]} on {rows[0]['n_texts']} held-out texts"
    columns = [
        "classifiers",
        score_heading(rows),
        "± sd",
        "loss",
        "seconds",
        "weights trained",
    ]
    table = SiteTable(title, ["variant"], columns, {})
    for row in summarise(rows):
        cells = [str(row["n"])]
        for column in ("score", "score_sd"):
            cells.append(blank(100 * number(row[column]), ".1f"))
        cells += [aligned(row["loss"]), f"{row['seconds']:.0f}", f"{row['trained']:,}"]
        table.add_row(row["variant"], *cells)
    if majority is not None:
        table.add_row(floor_words(rows), "", f"{100 * majority:.1f}", style="dim")
    return table


# ---------------------------------------------------------------------- figure


def finetuning_figure(rows: Sequence[Row], majority: float | None) -> Figure:
    """Draw each classifier as a dot, means over seeds and bases as lines or bars, and the majority class dotted.

    A kind of variant with at least three numbers of blocks gets a curve, as in Merchant et al. 2020, Figures 3 and 4;
    the others stand side by side, as in Wu et al. 2020, Table 1.

    Args:
        rows: one for each classifier.
        majority: score of always answering the most frequent class, or the mean number; None: there is none.
    """
    curves = _curve_widths(rows)
    others = _without_curve(rows, curves)
    widths = list(curves.values())
    if others:
        widths.append(max(2.2, 0.85 * len(distinct(others, "variant")) + 0.8))

    count = len(widths)
    size = (fmean(widths), 3.8)
    figure, axes = panels(
        count, count, size, (1.6, 0), width_ratios=widths, sharey=True
    )
    for kind, axis in zip(curves, axes, strict=False):
        _curve(axis, where(rows, kind=kind), where(rows, kind="none"), kind)
    if others:
        _side_by_side(axes[-1], others)
    axes[0].set_ylabel(f"held-out texts: {score_words(rows)}")
    if majority is not None:
        _draw_majority(axes, majority, floor_words(rows))
    return figure


def _without_curve(rows: Sequence[Row], curves: Collection[str]) -> list[Row]:
    """Return the rows of the other kinds; none if the whole model would stand alone."""
    others = [row for row in rows if row["kind"] not in curves]
    if curves and set(values(others, "kind")) <= {"none"}:
        return []
    return others


def _draw_majority(axes: Sequence[Axes], majority: float, words: str) -> None:
    look: Look = {"color": "0.5", "linestyle": ":", "linewidth": 1.2, "zorder": 0}
    lines = [axis.axhline(100 * majority, **look) for axis in axes]
    place: Look = {"loc": "outside right upper", "frameon": False, "fontsize": 8}
    axes[0].figure.legend(lines[:1], [words], **place)


def _curve_widths(rows: Sequence[Row]) -> dict[str, float]:
    """Return the kinds of variants that have a curve, and the width of its panel in inches."""
    widths = {}
    for kind in ACROSS:
        count = len(distinct(where(rows, kind=kind), "count"))
        if count >= CURVE_FROM:
            widths[kind] = max(3.2, 0.36 * count + 1.2)
    return widths


def _curve(axis: Axes, rows: Sequence[Row], whole: Sequence[Row], kind: str) -> None:
    """Draw the score against the number of blocks; the whole model has its own place on the same axis."""
    colour = MODEL_COLOURS[list(ACROSS).index(kind)]
    places = {
        "bottom": UNFROZEN,
        "top": 0,
        "layers": max(values([*rows, *whole], "layers")),
    }
    counts = grouped(rows, "count")
    if whole:
        counts[places[kind]] = [*counts.get(places[kind], []), *whole]
    across = sorted(counts)
    means = [_dots(axis, count, counts[count], colour) for count in across]
    axis.plot(across, means, color=colour, linewidth=1.5)
    axis.set(xticks=across, xlabel=ACROSS[kind])


def _side_by_side(axis: Axes, rows: Sequence[Row]) -> None:
    variants = grouped(rows, "variant")
    colour = MODEL_COLOURS[3]
    for place, runs in enumerate(variants.values()):
        middle = _dots(axis, place, runs, colour)
        axis.hlines(middle, place - 0.3, place + 0.3, color=colour, linewidth=1.8)
    axis.set_xticks(range(len(variants)), [name.replace("-", " ") for name in variants])
    axis.set_xlim(-0.6, len(variants) - 0.4)


def _dots(axis: Axes, place: float, rows: Sequence[Row], colour: str) -> float:
    """Draw scores as dots side by side around one place, and return their mean."""
    scores = numbers(rows, "score", 100)
    middle = (len(scores) - 1) / 2
    step = 0.3 / max(1, len(scores) - 1)
    across = [place + (count - middle) * step for count in range(len(scores))]
    look: Look = {"linestyle": "", "marker": "o", "markersize": 3.5}
    axis.plot(across, scores, color=colour, alpha=0.45, **look)
    return fmean(scores)
