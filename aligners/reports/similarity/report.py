"""The report of a comparison of representations: heat maps, lines along matching layers, a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from matplotlib.figure import Figure
from rich.table import Table

from aligners.reports.names import file_names, site_name, with_short_names
from aligners.reports.report import Report, Row
from aligners.reports.screen import site_table
from aligners.reports.similarity.figures import block_map, heat_maps, layer_lines, pair_lines
from aligners.similarity.controls import matching_layers

__all__ = ["report", "similarity_tables"]

MOST_PAIRS = 12  # of different models, each of which has figures and a table of its own by default
SHOWN = {"value": "", "held_out": "other texts", "null": "null", "untrained": "untrained"}


def report(
    meta: Row, rows: Sequence[Row], layers: Sequence[Row], distances: Sequence[Row], each_pair: bool | None = None
) -> Report:
    """Make the report from rows, and from figures of layers and of whole models.

    Args:
        meta: what holds for all rows.
        rows: one for each pair of models, layer pair, measure, direction and kind of features.
        layers: one for each layer of each model: nuclear norm, localization score.
        distances: one for each pair of models of one depth.
        each_pair: whether each pair of models has figures and a table of its own; default: up to a dozen pairs.
    """
    shown = with_short_names(rows)
    several = sum(x != y for x, y in _pairs(rows))
    alone = several <= MOST_PAIRS if each_pair is None else each_pair
    said = [] if alone else [
        f"{several} pairs of models: one figure shows all of them, and each has its rows in similarity.csv. "
        "`--each_pair true` makes figures and a table of each."
    ]  # fmt: skip
    return Report(
        "similarity",
        meta,
        rows,
        tables={"layers": layers, "distances": distances},
        figures=_figures(shown, alone),
        screen=similarity_tables(shown) if alone else [],
        sentences=said
        + [
            f"Angular distance of {line['model_x']} and {line['model_y']} (Brown et al., eq. 2), from CKA: "
            f"{line['angular_distance']:.3f}"
            for line in (with_short_names(distances) if alone else [])
        ],
    )


def _figures(rows: Sequence[Row], alone: bool) -> dict[str, Callable[[], Figure]]:
    """List the figures: two for each pair of models, or one for all; of more than two models, one for each measure."""
    figures: dict[str, Callable[[], Figure]] = {}
    names = file_names(row[f"model_{side}"] for row in rows for side in "xy")
    pairs = _pairs(rows)
    for (model_x, model_y), panel in pairs.items() if alone else ():
        pair = f"{names[model_x]}_{names[model_y]}"
        figures[f"layers_{pair}"] = partial(heat_maps, _raw(panel))
        if model_x != model_y:
            figures[f"diagonal_{pair}"] = partial(layer_lines, panel)
    if not alone:
        figures["diagonal_all"] = partial(pair_lines, [panel for (x, y), panel in pairs.items() if x != y])
    if len(names) > 2:
        for measure in dict.fromkeys(row["measure"] for row in rows):
            own = [row for row in _raw(rows) if row["measure"] == measure]
            figures[f"all_{measure}"] = partial(block_map, own)
    return figures


def similarity_tables(rows: Sequence[Row]) -> list[Table]:
    """Make a table for each pair of models: measures down, matching layers across, controls below each value."""
    return [_table(_raw(panel), x, y) for (x, y), panel in _pairs(rows).items() if x != y]


def _raw(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["features"] == "raw"]


def _pairs(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    pairs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        pairs.setdefault((row["model_x"], row["model_y"]), []).append(row)
    return pairs


def _table(rows: Sequence[Row], model_x: str, model_y: str) -> Table:
    pairs = matching_layers(*(sorted({row[f"layer_{side}"] for row in rows}) for side in "xy"))
    title = f"{model_x} and {model_y}, matching layers"
    table = site_table(title, ["measure", ""], [], {"": [site_name(pair) for pair in pairs]})
    for label in dict.fromkeys(row["label"] for row in rows):
        cells = {(row["layer_x"], row["layer_y"]): row for row in rows if row["label"] == label}
        for column, said in SHOWN.items():
            found = [cells[pair][column] if pair in cells else None for pair in pairs]
            if any(value is not None for value in found):
                values = ["" if value is None else f"{value:.3f}" for value in found]
                table.add_row(label if column == "value" else "", said, *values, style=None if not said else "dim")
    return table
