"""The report of a fine-tuning: every classifier, and a summary by variant."""

from collections.abc import Sequence
from functools import partial
from statistics import mean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aligners.errors import finite
from aligners.reports.drawing import MODEL_COLOURS, panels
from aligners.reports.names import WORDS, aligned, floor_words, score_heading, score_words
from aligners.reports.report import Report, Row, distinct, grouped, number, where
from aligners.reports.screen import SiteTable

CURVE_FROM = 3  # numbers of blocks; fewer stand side by side
UNFROZEN = -1  # where Merchant et al. put the model with nothing frozen
ACROSS = WORDS["finetuning"]


def report(meta: Row, rows: Sequence[Row]) -> Report:
    """Make the report from one row for each finished classifier."""
    majority, tables = meta["majority_score"], {"summary": summarise(rows)}
    figures, screen = (
        {"finetuning": partial(finetuning_figure, rows, majority)},
        [finetuning_table(rows, majority)],
    )
    return Report("finetuning", meta, rows, tables, figures=figures, screen=screen)


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Summarise each variant in a row: means over seeds and bases, and standard deviations of score and accuracy."""
    return [
        {"variant": variant, "kind": runs[0]["kind"], "count": runs[0]["count"], "n": len(runs)}
        | {
            "score_name": runs[0]["score_name"],
            **_spread(runs, "score"),
            **_spread(runs, "accuracy"),
        }
        | {name: finite(mean(number(row[name]) for row in runs)) for name in ("loss", "seconds")}
        | {"trained": runs[0]["trained"]}
        for variant, runs in grouped(rows, "variant").items()
    ]


def _spread(rows: Sequence[Row], column: str) -> Row:
    """Return the mean and standard deviation of a column, or None if some row lacks it."""
    values = [row[column] for row in rows]
    if None in values:
        return {column: None, f"{column}_sd": None}
    return {column: mean(values), f"{column}_sd": stdev(values) if len(values) > 1 else None}


def finetuning_table(rows: Sequence[Row], majority: float | None) -> SiteTable:
    """Make a table of scores by variant; the last line is the majority class, or the mean number, if there is one."""
    words = score_words(rows)
    title = f"{words[0].upper()}{words[1:]} on {rows[0]['n_texts']} held-out texts"
    columns = ["classifiers", score_heading(rows), "± sd", "loss", "seconds", "weights trained"]
    table = SiteTable(title, ["variant"], columns, {})
    for row in summarise(rows):
        scores = (
            "" if row[name] is None else f"{100 * row[name]:.1f}" for name in ("score", "score_sd")
        )
        further = aligned(row["loss"]), f"{row['seconds']:.0f}", f"{row['trained']:,}"
        table.add_row(row["variant"], str(row["n"]), *scores, *further)
    if majority is not None:
        table.add_row(floor_words(rows), "", f"{100 * majority:.1f}", style="dim")
    return table


def finetuning_figure(rows: Sequence[Row], majority: float | None) -> Figure:
    """Draw each classifier as a dot, means over seeds and bases as lines or bars, and the majority class dotted.

    A kind of variant with at least three numbers of blocks gets a curve, as in Merchant et al. 2020, Figures 3 and 4;
    the others stand side by side, as in Wu et al. 2020, Table 1.

    Args:
        rows: one for each classifier.
        majority: score of always answering the most frequent class, or the mean number; None: there is none.
    """
    counts = {kind: distinct(where(rows, kind=kind), "count") for kind in ACROSS}
    curves = [kind for kind in ACROSS if len(counts[kind]) >= CURVE_FROM]
    beside = [row for row in rows if row["kind"] not in curves]
    if curves and not {row["kind"] for row in beside} - {
        "none"
    }:  # nothing that the whole model is compared with
        beside = []
    widths = [max(3.2, 0.36 * len(counts[kind]) + 1.2) for kind in curves]
    if beside:
        widths.append(max(2.2, 0.85 * len(distinct(beside, "variant")) + 0.8))
    figure, axes = panels(
        len(widths), len(widths), (mean(widths), 3.8), (1.6, 0), width_ratios=widths, sharey=True
    )
    for kind, axis in zip(curves, axes, strict=False):
        _curve(axis, [row for row in rows if row["kind"] in (kind, "none")], kind)
    if beside:
        _side_by_side(axes[-1], beside)
    axes[0].set_ylabel(f"held-out texts: {score_words(rows)}")
    if majority is not None:
        for axis in axes:
            line = axis.axhline(100 * majority, color="0.5", linestyle=":", linewidth=1.2, zorder=0)
        figure.legend(
            [line], [floor_words(rows)], loc="outside right upper", frameon=False, fontsize=8
        )
    return figure


def _curve(axis: Axes, rows: Sequence[Row], kind: str) -> None:
    """Draw the score against the number of blocks; the whole model has its own place on the same axis."""
    colour = MODEL_COLOURS[list(ACROSS).index(kind)]
    whole = {"bottom": UNFROZEN, "top": 0, "layers": max(row["layers"] for row in rows)}[kind]
    placed = grouped(
        [row | {"place": whole if row["kind"] == "none" else row["count"]} for row in rows], "place"
    )
    across = sorted(placed)
    axis.plot(
        across,
        [_dots(axis, place, placed[place], colour) for place in across],
        color=colour,
        linewidth=1.5,
    )
    axis.set(xticks=across, xlabel=ACROSS[kind])


def _side_by_side(axis: Axes, rows: Sequence[Row]) -> None:
    variants = grouped(rows, "variant")
    for place, runs in enumerate(variants.values()):
        middle = _dots(axis, place, runs, MODEL_COLOURS[3])
        axis.hlines(middle, place - 0.3, place + 0.3, color=MODEL_COLOURS[3], linewidth=1.8)
    axis.set_xticks(range(len(variants)), [name.replace("-", " ") for name in variants])
    axis.set_xlim(-0.6, len(variants) - 0.4)


def _dots(axis: Axes, place: float, rows: Sequence[Row], colour: str) -> float:
    """Draw scores as dots side by side around one place, and return their mean."""
    values = [100 * number(row["score"]) for row in rows]
    middle = (len(values) - 1) / 2
    across = [
        place + (number - middle) * 0.3 / max(1, len(values) - 1) for number in range(len(values))
    ]
    axis.plot(across, values, linestyle="", marker="o", markersize=3.5, color=colour, alpha=0.45)
    return mean(values)
