"""The report of a comparison of representations: JSON, CSV, heat maps, lines, a table on screen, W&B."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from rich.box import SIMPLE_HEAD
from rich.table import Table

from callbacks.layer_maps import block_map, heat_maps, layer_lines
from callbacks.showing import log_to_wandb, say_where, screen
from callbacks.writing import environment, save_figure, table_csv, write_text
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
        for table in similarity_tables(pl_module.rows):
            console.print(table)
        for line in pl_module.distances:
            console.print(
                f"Angular distance of {line['model_x']} and {line['model_y']} (Brown et al., eq. 2), from CKA: "
                f"{line['angular_distance']:.3f}",
                highlight=False,
            )
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
    for (model_x, model_y), panel in _pairs(rows).items():
        name = re.sub(r"[^\w.=-]+", "-", f"{model_x}_{model_y}")
        raw = [row for row in panel if row["features"] == "raw"]
        drawn = {f"layers_{name}": heat_maps(raw)}
        if model_x != model_y:
            drawn[f"diagonal_{name}"] = layer_lines(panel)
        for stem, figure in drawn.items():
            figures.append(folder / f"{stem}.png")
            save_figure(figure, figures[-1])
    if len({row[f"model_{side}"] for row in rows for side in "xy"}) > 2:
        for measure in dict.fromkeys(row["measure"] for row in rows):
            figures.append(folder / f"all_{measure}.png")
            own = [row for row in rows if row["measure"] == measure and row["features"] == "raw"]
            save_figure(block_map(own), figures[-1])
    return figures


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
    table = Table(
        title=f"\n{model_x} and {model_y}, matching layers",
        title_style="bold",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
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
