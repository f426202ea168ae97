"""The report of surgery: JSON, CSV, two figures, a table on screen, W&B."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from rich.table import Table

from finetuning.truncating import MEAN, SurgeryEvaluation
from reports.names import with_short_names
from reports.score_words import floor_words, score_words
from reports.showing import TitledTable, log_to_wandb, say_where, screen
from reports.surgery.figures import skipping_figure, truncation_figure
from reports.writing import environment, save_figure, table_csv, write_text

__all__ = ["SurgeryReport", "surgery_table", "write_surgery"]

Row = dict[str, Any]


class SurgeryReport(pl.Callback):
    """Writes the report when the evaluation ends, shows it, and logs it to W&B where the run has it.

    Args:
        folder: where.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Rank 0 writes; every rank holds the same rows."""
        if not isinstance(pl_module, SurgeryEvaluation) or not trainer.is_global_zero:
            return
        meta = {**pl_module.meta, **environment(trainer)}
        figures = write_surgery(self.folder, meta, pl_module.rows)
        console = screen()
        console.print(surgery_table(with_short_names(pl_module.rows), meta["majority_score"]))
        say_where(console, self.folder, log_to_wandb(trainer, "surgery", meta, pl_module.rows, figures))


def write_surgery(folder: Path, meta: Row, rows: Sequence[Row]) -> list[Path]:
    """Write surgery.json, surgery.csv, truncation.png and skipping.png, each whole or not at all.

    Args:
        folder: made if need be.
        meta: what holds for all rows.
        rows: one for each model and condition.

    Returns:
        The figures' paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "surgery.json", json.dumps({"meta": meta, "rows": list(rows)}, indent=1, allow_nan=False))
    write_text(folder / "surgery.csv", table_csv(rows))
    majority = meta["majority_score"]
    shown = with_short_names(rows)
    drawn = {"truncation": truncation_figure(shown, majority), "skipping": skipping_figure(shown, majority)}
    for name, figure in drawn.items():
        save_figure(figure, folder / f"{name}.png")
    return [folder / f"{name}.png" for name in drawn]


def surgery_table(rows: Sequence[Row], majority: float) -> Table:
    """The score of every truncation, by site: of each model, and of their mean."""
    cut = [row for row in rows if row["site"] is not None and row["kind"] != "native"]
    words = score_words(rows)
    table = TitledTable(
        f"{words[0].upper()}{words[1:]} of models truncated after a site, on {rows[0]['n_texts']} held-out texts "
        f"({floor_words(rows)}: {100 * majority:.1f})"
    )
    table.add_column("model", overflow="fold")
    table.add_column("head", no_wrap=True)
    sites = sorted({row["site"] for row in cut})
    for site in sites:
        table.add_column(str(site), justify="right", no_wrap=True)
    for model, kind in dict.fromkeys((row["model"], row["kind"]) for row in cut):
        own = {row["site"]: row["score"] for row in cut if (row["model"], row["kind"]) == (model, kind)}
        cells = ["" if own.get(site) is None else f"{100 * own[site]:.1f}" for site in sites]
        table.add_row(model, kind, *cells, style="bold" if model == MEAN else None)
    return table
