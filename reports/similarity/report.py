"""The report of a comparison of representations: JSON, CSV, heat maps, lines, a table on screen, W&B."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from matplotlib.figure import Figure
from rich.table import Table

from reports.names import file_names, with_short_names
from reports.showing import TitledTable, log_to_wandb, say, say_where, screen
from reports.similarity.layer_maps import block_map, heat_maps, layer_lines
from reports.writing import environment, save_figure, table_csv, write_text
from similarity.controls import matching_layers
from similarity.evaluation import SimilarityEvaluation

__all__ = ["SimilarityReport", "similarity_tables", "write_similarity"]

Row = dict[str, Any]
SHOWN = {"value": "", "held_out": "other texts", "null": "null", "untrained": "untrained"}


class SimilarityReport(pl.Callback):
    """Writes the report when the evaluation ends, shows it, and logs it to W&B where the run has it.

    Args:
        folder: where.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Rank 0 writes; every rank holds the same rows."""
        if not isinstance(pl_module, SimilarityEvaluation) or not trainer.is_global_zero:
            return
        meta = {**pl_module.meta, **environment(trainer)}
        figures = write_similarity(self.folder, meta, pl_module.rows, pl_module.layers, pl_module.distances)
        console = screen()
        for table in similarity_tables(with_short_names(pl_module.rows)):
            console.print(table)
        for line in with_short_names(pl_module.distances):
            names = f"{line['model_x']} and {line['model_y']}"
            say(console, f"Angular distance of {names} (Brown et al., eq. 2), from CKA: {line['angular_distance']:.3f}")
        say_where(console, self.folder, log_to_wandb(trainer, "similarity", meta, pl_module.rows, figures))


def write_similarity(
    folder: Path, meta: dict[str, Any], rows: Sequence[Row], layers: Sequence[Row], distances: Sequence[Row]
) -> list[Path]:
    """Write similarity.json, similarity.csv and figures, each whole or not at all.

    Two figures for each pair of models: all layer pairs, and along matching layers. For more than two models also one
    for each measure, with all layers of all models.

    Args:
        folder: made if need be.
        meta: what holds for all rows.
        rows: one for each pair of models, layer pair, measure, direction and kind of features.
        layers: one for each layer of each model: nuclear norm, localization score.
        distances: one for each pair of models of one depth.

    Returns:
        The figures' paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"meta": meta, "rows": list(rows), "layers": list(layers), "distances": list(distances)}
    write_text(folder / "similarity.json", json.dumps(whole, indent=1, allow_nan=False))
    write_text(folder / "similarity.csv", table_csv(rows))
    if layers:
        write_text(folder / "layers.csv", table_csv(layers))
    figures = []
    for stem, figure in _figures(rows):
        figures.append(folder / f"{stem}.png")
        save_figure(figure, figures[-1])
    return figures


def _figures(rows: Sequence[Row]) -> Iterator[tuple[str, Figure]]:
    """Every figure and the name of its file, drawn when it is asked for."""
    shown = with_short_names(rows)
    names = file_names(row[f"model_{side}"] for row in shown for side in "xy")
    for (model_x, model_y), panel in _pairs(shown).items():
        pair = f"{names[model_x]}_{names[model_y]}"
        yield f"layers_{pair}", heat_maps([row for row in panel if row["features"] == "raw"])
        if model_x != model_y:
            yield f"diagonal_{pair}", layer_lines(panel)
    if len(names) > 2:
        for measure in dict.fromkeys(row["measure"] for row in shown):
            own = [row for row in shown if row["measure"] == measure and row["features"] == "raw"]
            yield f"all_{measure}", block_map(own)


def similarity_tables(rows: Sequence[Row]) -> list[Table]:
    """For each pair of different models: measures down, matching layers across, controls below each value."""
    return [_table(panel, x, y) for (x, y), panel in _pairs(rows).items() if x != y]


def _pairs(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    pairs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        pairs.setdefault((row["model_x"], row["model_y"]), []).append(row)
    return pairs


def _table(panel: list[Row], model_x: str, model_y: str) -> Table:
    raw = [row for row in panel if row["features"] == "raw"]
    pairs = matching_layers(*(sorted({row[f"layer_{side}"] for row in raw}) for side in "xy"))
    table = TitledTable(f"{model_x} and {model_y}, matching layers")
    table.add_column("measure", no_wrap=True)
    table.add_column("", no_wrap=True, style="dim")
    for i, j in pairs:
        table.add_column(str(i) if i == j else f"{i}→{j}", justify="right", no_wrap=True)
    for label in dict.fromkeys(row["label"] for row in raw):
        cells = {(row["layer_x"], row["layer_y"]): row for row in raw if row["label"] == label}
        for column, said in SHOWN.items():
            found = [cells[pair][column] if pair in cells else None for pair in pairs]
            if any(value is not None for value in found):
                values = ["" if value is None else f"{value:.3f}" for value in found]
                table.add_row(label if column == "value" else "", said, *values, style=None if not said else "dim")
    return table
