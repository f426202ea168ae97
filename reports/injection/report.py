"""The report of an injection: JSON, CSV, Markdown, figures, a table on screen, and a reading of it in words."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from rich.table import Table

from aligners.fitting.outcomes import TRAINED_WELL
from aligners.injection.evaluation import InjectionEvaluation
from reports.injection.figures import accuracy_figure, fvu_figure
from reports.injection.words import below_chance, panel_title, panels, price_of_bijectivity, reading
from reports.names import names_in_full, with_short_names
from reports.score_words import score_heading
from reports.showing import TitledTable, log_to_wandb, say, say_where, screen
from reports.writing import environment, save_figure, table_csv, table_markdown, write_text

__all__ = ["Report", "console_tables", "write_report"]

FIGURES = {"fvu": fvu_figure, "accuracy": accuracy_figure}
DRAWN = {"fvu": "fvu", "accuracy": "score"}  # the column of each figure
COLUMN_GROUPS = {
    "fvu": ("FVU", False), "fvu_unseen": ("unseen", False), "fvu_other": ("other", False),
    "fvu_inverse": ("inverse", False), "score": ("", True),  # see score_heading
}  # fmt: skip
MOST_NUMBERS_ABREAST = 15
MARKDOWN_COLUMNS = {
    "model_x": "from", "model_y": "into", "rows": "rows", "site_x": "site", "method": "method",
    "parameters": "parameters",
    "fvu": "FVU", "fvu_seen": "FVU of seen types", "fvu_unseen": "FVU of unseen types",
    "fvu_other": "FVU on other text", "fvu_inverse": "FVU of the inverse", "mse": "mse", "cosine": "cosine",
    "round_trip": "round trip", "accuracy": "accuracy", "score_name": "score", "score": "value", "score_low": "low",
    "score_high": "high", "loss": "loss", "agreement": "agreement",
}  # fmt: skip


class Report(pl.Callback):
    """Writes the report when the evaluation ends, shows it, and logs it to W&B where the run has it.

    Args:
        folder: where; default: beside the run's other files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Rank 0 writes; every rank holds the same rows."""
        if not isinstance(pl_module, InjectionEvaluation):
            return
        folder = self.folder or Path(trainer.log_dir or trainer.default_root_dir)  # every rank asks rank 0 for it
        if not trainer.is_global_zero:
            return
        meta = {
            **pl_module.meta,
            **environment(trainer),
            "price_of_bijectivity": price_of_bijectivity(pl_module.rows),
            "below_chance": below_chance(pl_module.rows),
        }
        figures = write_report(folder, meta, pl_module.rows)
        console, shown = screen(), with_short_names(pl_module.rows)
        for table in console_tables(shown):
            console.print(table)
        say(console, "\n" + "\n".join([reading(shown), *left_out(meta)]))
        say_where(console, folder, log_to_wandb(trainer, "report", meta, pl_module.rows, figures))


def left_out(meta: dict[str, Any]) -> list[str]:
    """What was asked for and not measured, a sentence for each."""
    missing = [f"Nothing was injected {direction}: {why}." for direction, why in meta["not_injected"].items()]
    return missing + [f"Left out, {name}: {why}" for name, why in meta["refusals"].items()]


def write_report(folder: Path, meta: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[Path]:
    """Write report.json, report.csv, report.md and the figures, each whole or not at all.

    Args:
        folder: made if need be.
        meta: what holds for all rows.
        rows: plain values, one row for each method, site, direction and kind of rows of each pair of models.

    Returns:
        The figures: of accuracy only where something was injected.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "report.json", json.dumps({"meta": meta, "rows": list(rows)}, indent=1, allow_nan=False))
    write_text(folder / "report.csv", table_csv(rows))
    shown = with_short_names(rows)
    write_text(folder / "report.md", table_markdown(shown, MARKDOWN_COLUMNS) + names_in_full(rows))
    figures = [name for name in FIGURES if any(row[DRAWN[name]] is not None for row in rows)]
    for name in figures:
        save_figure(FIGURES[name](shown), folder / f"{name}.png")
    return [folder / f"{name}.png" for name in figures]


def console_tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """For each direction and kind of rows, methods down and sites across.

    FVU, also on unseen types and on other text, FVU of the inverse, the score: side by side as far as that fits a
    screen, one below the other where there are many sites. Without any number, a group of columns is left out.
    """
    tables = []
    for panel in panels(rows):
        pairs = list(dict.fromkeys((row["site_x"], row["site_y"]) for row in panel if row["site_x"] is not None))
        filled = [group for group in COLUMN_GROUPS if any(row.get(group) is not None for row in panel)]
        count = math.ceil(len(filled) / max(1, MOST_NUMBERS_ABREAST // len(pairs)))
        together = [list(part) for part in np.array_split(filled, count)]
        tables += [_table(panel, pairs, panel_title(panel), groups) for groups in together]
    return tables


def _table(panel: list[dict[str, Any]], pairs: list[tuple[int, int]], title: str, groups: list[str]) -> Table:
    table = TitledTable(title)
    table.add_column("\nmethod", no_wrap=True)
    table.add_column("\nparameters", justify="right", no_wrap=True)
    for group in groups:
        for place, (i, j) in enumerate(pairs):
            over = (COLUMN_GROUPS[group][0] or score_heading(panel)) if place == 0 else ""
            table.add_column(f"{over}\n{i if i == j else f'{i}→{j}'}", justify="right", no_wrap=True)
    for name in dict.fromkeys(row["method"] for row in panel):
        line = {(row["site_x"], row["site_y"]): row for row in panel if row["method"] == name}
        first = next(iter(line.values()))
        cells = [
            _short(line.get(pair, first)[group], COLUMN_GROUPS[group][1]) + _mark(line.get(pair, first))
            for group in groups
            for pair in pairs
        ]
        parameters = f"{first['parameters']:,}" if first["parameters"] else ""
        table.add_row(name, parameters, *cells, style={"ceiling": "green", "floor": "dim"}.get(first["role"]))
    return table


def _mark(row: dict[str, Any]) -> str:
    """A star where the map is not what training made of it; the sentences below the table say what it is."""
    return "" if row.get("training") in (None, TRAINED_WELL) else "*"


def _short(value: float | None, percent: bool) -> str:
    if value is None:
        return ""
    if percent:
        return f"{100 * value:.1f}"
    return f"{value:.0e}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"
