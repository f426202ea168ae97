"""The figure of a fine-tuning: the score by what was frozen or left out."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reports.drawing import COLOURS, panels
from reports.report import Row
from reports.words import floor_words, score_words

__all__ = ["finetuning_figure"]

CURVE_FROM = 3  # numbers of blocks; fewer are set side by side
UNFROZEN = -1  # where Merchant et al. put the model with nothing frozen
ACROSS = {
    "bottom": "bottom blocks frozen (-1: nothing)",
    "top": "top blocks frozen",
    "layers": "blocks that are left",
}


def finetuning_figure(rows: Sequence[Row], majority: float) -> Figure:
    """Draw each classifier as a dot, means over seeds and bases as lines or bars, and the majority class dotted.

    A kind of variant with at least three numbers of blocks gets a curve, as in Merchant et al. 2020, Figures 3 and 4;
    the others stand side by side, as in Wu et al. 2020, Table 1.

    Args:
        rows: one for each classifier.
        majority: score of always answering the most frequent class, or the mean number.
    """
    counts = {kind: {row["count"] for row in rows if row["kind"] == kind} for kind in ACROSS}
    curves = [kind for kind in ACROSS if len(counts[kind]) >= CURVE_FROM]
    beside = [row for row in rows if row["kind"] not in curves and (row["kind"] != "none" or not curves)]
    if {row["kind"] for row in beside} - {"none"}:  # what the others are compared with
        beside = [row for row in rows if row["kind"] not in curves]
    widths = [max(3.2, 0.36 * len(counts[kind]) + 1.2) for kind in curves]
    if beside:
        widths.append(max(2.2, 0.85 * len({row["variant"] for row in beside}) + 0.8))
    count = len(widths)
    figure, axes = panels(count, count, (mean(widths), 3.8), (1.6, 0), width_ratios=widths, sharey=True)
    for kind, axis in zip(curves, axes, strict=False):
        _curve(axis, [row for row in rows if row["kind"] in (kind, "none")], kind)
    if beside:
        _side_by_side(axes[-1], beside)
    for axis in axes:
        line = axis.axhline(100 * majority, color="0.5", linestyle=":", linewidth=1.2, zorder=0)
    axes[0].set_ylabel(f"held-out texts: {score_words(rows)}")
    figure.legend([line], [floor_words(rows)], loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _curve(axis: Axes, rows: Sequence[Row], kind: str) -> None:
    """Draw the score against the number of blocks; the whole model has a place of its own on the same axis."""
    colour = COLOURS[list(ACROSS).index(kind)]
    whole = {"bottom": UNFROZEN, "top": 0, "layers": max(row["layers"] for row in rows)}[kind]
    places: dict[int, list[float]] = {}
    for row in rows:
        place = whole if row["kind"] == "none" else row["count"]
        places.setdefault(place, []).append(100 * row["score"])
    across = sorted(places)
    for place in across:
        _dots(axis, place, places[place], colour)
    axis.plot(across, [mean(places[place]) for place in across], color=colour, linewidth=1.5)
    axis.set_xticks(across)
    axis.set_xlabel(ACROSS[kind])


def _side_by_side(axis: Axes, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys(row["variant"] for row in rows))
    for place, name in enumerate(names):
        values = [100 * row["score"] for row in rows if row["variant"] == name]
        _dots(axis, place, values, COLOURS[3])
        axis.hlines(mean(values), place - 0.3, place + 0.3, color=COLOURS[3], linewidth=1.8)
    axis.set_xticks(range(len(names)), [name.replace("-", " ") for name in names])
    axis.set_xlim(-0.6, len(names) - 0.4)


def _dots(axis: Axes, place: float, values: Sequence[float], colour: str) -> None:
    """Draw dots around one place, a little apart."""
    step = 0.3 / max(1, len(values) - 1)
    across = [place + (number - (len(values) - 1) / 2) * step * (len(values) > 1) for number in range(len(values))]
    axis.plot(across, values, linestyle="", marker="o", markersize=3.5, color=colour, alpha=0.45)
