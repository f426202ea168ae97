"""The report of a comparison of representations: heat maps, lines along matching layers, a table."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from aligners.reports import drawing
from aligners.reports.names import WORDS, file_names, site_name, with_short_names
from aligners.reports.report import (
    Report,
    Row,
    distinct,
    grouped,
    is_known,
    models_in,
    number,
    where,
)
from aligners.reports.screen import SiteTable
from aligners.reports.templates import sentences
from aligners.similarity.controls import matching_layers

MOST_PAIRS = 12  # of different models, each of which has figures and a table of its own by default
ABREAST = 5
NARROW = 30  # letters that fit below one of so many panels abreast
LARGEST = 14  # inches
CELL, SMALL_CELL = 0.42, 0.27  # inches, with a number in letters of either size
LINES: dict[str, drawing.Look] = drawing.LOOKS["similarity"]


def report(
    meta: Row,
    rows: Sequence[Row],
    layers: Sequence[Row],
    distances: Sequence[Row],
    missing: Sequence[Row] = (),
    models: Sequence[Row] = (),
    each_pair: bool | None = None,
) -> Report:
    """Make the report from rows, and from figures of layers and of whole models.

    Args:
        meta: what holds for all rows.
        rows: one for each pair of models, layer pair, measure, direction and kind of features.
        layers: one for each layer of each model: nuclear norm, localization score.
        distances: one for each pair of models of one depth.
        missing: one for each figure of a measure and a pair of models that could not be computed, and why.
        models: one for each model: its sizes.
        each_pair: whether each pair of models has figures and a table of its own; default: up to a dozen pairs.
    """
    shown = with_short_names(rows)
    several = len(_different(shown))
    alone = several <= MOST_PAIRS if each_pair is None else each_pair
    further = {"missing": missing, "models": models}
    tables = {
        "layers": layers,
        "distances": distances,
        **{name: rows for name, rows in further.items() if rows},
    }
    figures = _figures(shown, alone)
    screen = [_table(_raw(panel)) for panel in _different(shown)] if alone else []
    findings = sentences(
        "similarity", alone=alone, several=several, distances=with_short_names(distances), meta=meta
    )
    findings = [*_beside_far(_raw(shown)), *findings]
    return Report(
        "similarity", meta, rows, tables, figures=figures, screen=screen, sentences=findings
    )


def _beside_far(rows: Sequence[Row]) -> list[str]:
    """What the measures are with rows far from all others, or without them, at matching layers."""
    sentences_of_far = []
    for column, which in {"with_far": "With", "without_far": "Without"}.items():
        each = []
        for label, line in grouped(rows, "label").items():
            pairs = matching_layers(*_layers(line))
            near = [row for row in line if (row["layer_x"], row["layer_y"]) in pairs]
            known = [
                row for row in near if row.get(column) is not None and row["value"] is not None
            ]
            if known:
                beside, own = _span(known, column), _span(known, "value")
                each.append(f"{label} {beside} for {own}")
        if each:
            said = (
                f"{which} the rows that are far from all others the values at matching layers are"
            )
            sentences_of_far.append(f"{said} {', '.join(each)}.")
    return sentences_of_far


def _span(rows: Sequence[Row], column: str) -> str:
    """The least and the largest value of a column."""
    least, most = (f"{end(row[column] for row in rows):.3f}" for end in (min, max))
    return least if least == most else f"{least} to {most}"


def _figures(rows: Sequence[Row], alone: bool) -> dict[str, Callable[[], Figure]]:
    """List the figures: two for each pair of models, or one for all; of more than two models, one for each measure."""
    figures: dict[str, Callable[[], Figure]] = {}
    names = file_names(models_in(rows))
    panels = grouped(rows, "model_x", "model_y").items() if alone else ()
    for (model_x, model_y), panel in sorted(panels, key=lambda item: item[0][0] == item[0][1]):
        pair = f"{names[model_x]}_{names[model_y]}"
        if model_x != model_y:
            figures[f"diagonal_{pair}"] = partial(layer_lines, panel)
        figures[f"layers_{pair}"] = partial(pair_map, _raw(panel))
    if not alone:
        figures["diagonal_all"] = partial(pair_lines, _different(rows))
    by_measure = grouped(_raw(rows), "measure") if len(names) > 2 else {}
    return figures | {
        f"all_{measure}": partial(block_map, measured) for measure, measured in by_measure.items()
    }


def _different(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each pair of different models."""
    return [panel for (x, y), panel in grouped(rows, "model_x", "model_y").items() if x != y]


def _layers(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """The layers of X and of Y, in order."""
    return sorted(distinct(rows, "layer_x")), sorted(distinct(rows, "layer_y"))


def _raw(rows: Sequence[Row]) -> list[Row]:
    return where(rows, features="raw")


def _table(rows: Sequence[Row]) -> SiteTable:
    """Make the table of a pair of models: measures down, matching layers across, controls below each value."""
    pairs = matching_layers(*_layers(rows))
    title = f"{rows[0]['model_x']} and {rows[0]['model_y']}, matching layers"
    table = SiteTable(title, ["measure", ""], [], {"": [site_name(pair) for pair in pairs]})
    for measure, measured in grouped(rows, "label").items():
        for column, words in WORDS["similarity"].items():
            known = [
                row for row in measured if row.get(column) is not None
            ]  # reports of earlier versions lack some
            cells = {(row["layer_x"], row["layer_y"]): f"{row[column]:.3f}" for row in known}
            values = [cells.get(pair, "") for pair in pairs]
            if any(values):
                table.add_row(measure, words, *values, style="dim" if words else None)
    return table


def pair_map(rows: Sequence[Row]) -> Figure:
    """Draw every measure between all layers of two models: X's layers up, Y's across, one colour scale from 0 to 1.

    Args:
        rows: those of one pair of models, with raw features.
    """
    measures, layers = grouped(rows, "label"), _layers(rows)
    cell = CELL if max(map(len, layers)) <= 8 else SMALL_CELL
    height, width = (max(1.9, cell * len(entries)) for entries in layers)
    size = width + 0.55, height + 0.75
    figure, axes = drawing.panels(len(measures), ABREAST, size, (1.1, 0.5), boxed=True, font=8)
    columns = "layer_x", "layer_y", "value"
    drawing.heat_maps(
        axes,
        measures,
        measures.values(),
        columns,
        *layers,
        shrink=0.6,
        pad=0.01,
        label="similarity",
    )
    drawing.label(figure, f"layer of {rows[0]['model_y']}", f"layer of {rows[0]['model_x']}")
    return figure


def block_map(rows: Sequence[Row]) -> Figure:
    """Draw one measure between all layers of all models, a block for each pair, as in Wu et al. 2020, Figure 1.

    Entry (a, b) is the similarity of a to b, even if the measure is not symmetric.

    Args:
        rows: those of one measure and all pairs of models, with raw features.
    """
    models, layers = (
        models_in(rows),
        {(row[f"model_{side}"], row[f"layer_{side}"]) for row in rows for side in "xy"},
    )
    places = sorted(layers, key=lambda place: (models.index(place[0]), place[1]))
    blocks = Counter(model for model, _ in places)
    room = 0.3 * len(places)
    size = min(max(3.5, room), LARGEST)
    figure, (axis,) = drawing.panels(1, 1, (size, size), (1.6, 1.0), boxed=True, font=8)
    numbers = [layer for _, layer in places]
    image = drawing.heat_map(axis, _both_directions(rows, places), numbers, numbers)
    crowded = room > LARGEST
    if crowded:  # there is no room for the numbers of layers
        axis.set(xticks=[], yticks=[])
    _name_blocks(axis, blocks, crowded)
    figure.suptitle(rows[0]["measure"], fontsize=10)
    figure.colorbar(
        image, ax=axis, shrink=0.6, pad=0.08, label="similarity of the row's layer to the column's"
    )
    return figure


def _both_directions(rows: Sequence[Row], places: Sequence[tuple[str, int]]) -> NDArray[np.float64]:
    """Arrange the similarity of each (model, layer) to each other; NaN where none was measured."""
    cells = []
    for row in rows:
        x, y = ((row[f"model_{side}"], row[f"layer_{side}"]) for side in "xy")
        ends = {"forward": [(x, y)], "backward": [(y, x)]}.get(row["direction"], [(x, y), (y, x)])
        cells += [{"from": a, "to": b, "value": row["value"]} for a, b in ends]
    return drawing.layer_grid(cells, ("from", "to", "value"), places, places)


def _name_blocks(axis: Axes, blocks: Mapping[str, int], crowded: bool) -> None:
    """Separate the models by white lines, and name them above and on the right, across their blocks if crowded."""
    names, sizes = list(blocks), np.array(list(blocks.values()))
    ends = np.cumsum(sizes)
    for end in ends[:-1]:
        axis.axhline(end - 0.5, color="w", linewidth=1.5)
        axis.axvline(end - 0.5, color="w", linewidth=1.5)
    middles = ends - sizes / 2 - 0.5
    above, right = axis.secondary_xaxis("top"), axis.secondary_yaxis("right")
    above.set_xticks(middles, names, rotation=90 if crowded else 0)
    right.set_yticks(middles, names, rotation=0 if crowded else 90, va="center")
    for labels in (above, right):
        labels.tick_params(length=0)


def layer_lines(rows: Sequence[Row]) -> Figure:
    """Draw every measure along matching layers: the value with its interval, and the controls that were computed.

    Args:
        rows: those of one pair of models.
    """
    measures = distinct(_raw(rows), "label")
    pairs = matching_layers(*_layers(rows))
    figure, axes = drawing.panels(
        len(measures), ABREAST, (2.5, 2.1), (1.6, 0.4), font=8, sharex=True, sharey=True
    )
    for axis, measure in zip(axes, measures, strict=True):
        _draw(axis, _line(rows, measure, pairs))
        drawing.name_sites(axis, measure, map(site_name, pairs), NARROW)
        axis.axhline(0, color="0.85", linewidth=0.8, zorder=0)
    handles, names = drawing.shown_lines(axes)
    interval = ", 95 % interval" * is_known(rows, "low")
    names = [name + interval * (name == LINES["value"]["label"]) for name in names]
    figure.legend(handles, names, loc="outside right center", frameon=False)
    drawing.label(figure, "layer", "similarity", f"{rows[0]['model_x']} and {rows[0]['model_y']}")
    return figure


def pair_lines(panels_of_pairs: Sequence[Sequence[Row]]) -> Figure:
    """Draw every measure along matching layers, a thin line for each pair of models and a thick one for their median.

    Pairs of other depths are stretched to the deepest.

    Args:
        panels_of_pairs: the rows of each pair of two models.
    """
    lines: dict[str, list[NDArray[np.float64]]] = {}
    layers: set[tuple[tuple[int, int], ...]] = set()
    for rows in panels_of_pairs:
        pairs = matching_layers(*_layers(rows))
        layers.add(tuple(pairs))
        for measure in distinct(_raw(rows), "label"):
            lines.setdefault(measure, []).append(_line(rows, measure, pairs)["value"])
    deepest = max(layers, key=len)
    most, names = (
        len(deepest),
        [site_name(pair) if len(layers) == 1 else str(pair[0]) for pair in deepest],
    )
    figure, axes = drawing.panels(
        len(lines), ABREAST, (2.5, 2.1), (0.6, 0.4), font=8, sharex=True, sharey=True
    )
    for axis, (measure, curves) in zip(axes, lines.items(), strict=True):
        stretched = np.array(
            [np.interp(np.linspace(0, 1, most), np.linspace(0, 1, len(one)), one) for one in curves]
        )
        axis.plot(stretched.T, color="0.6", linewidth=0.5, alpha=0.5)
        axis.plot(np.nanmedian(stretched, 0), **LINES["value"], markersize=3.5)
        drawing.name_sites(axis, measure, names, NARROW)
        axis.axhline(0, color="0.85", linewidth=0.8, zorder=0)
    across = "layer" if len(layers) == 1 else "layer of the deepest pair; the others stretched"
    drawing.label(
        figure, across, "similarity", f"{len(panels_of_pairs)} pairs of models, and their median"
    )
    return figure


def _line(
    rows: Sequence[Row], measure: str, pairs: list[tuple[int, int]]
) -> dict[str, NDArray[np.float64]]:
    """Return each quantity along the matching layers; NaN where it is missing."""
    by_place = {
        (row["layer_x"], row["layer_y"], row["features"]): row for row in where(rows, label=measure)
    }

    def along(column: str, features: str = "raw") -> NDArray[np.float64]:
        return np.array(
            [number(by_place.get((*pair, features), {}).get(column)) for pair in pairs], dtype=float
        )

    line = {
        name: along(name)
        for name in ("value", "low", "high", "held_out", "null", "untrained", "ceiling")
    }
    return {**line, "standardised": along("value", "standardised")}


def _draw(axis: Axes, line: dict[str, NDArray[np.float64]]) -> None:
    """Draw the quantities that have values."""
    places = np.arange(len(line["value"]))
    if np.isfinite(line["low"]).any():
        axis.vlines(
            places,
            line["low"],
            line["high"],
            color=LINES["value"]["color"],
            alpha=0.4,
            linewidth=2.5,
        )
    for name, style in LINES.items():
        if np.isfinite(line[name]).any():
            axis.plot(places, line[name], markersize=3.5, **style)
