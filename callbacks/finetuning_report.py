"""The report of a fine-tuning: JSON, CSV, a figure, a table on screen, W&B."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import lightning.pytorch as pl
from rich.table import Table

from callbacks.finetuning_figures import finetuning_figure
from callbacks.showing import TitledTable, log_to_wandb, say_where, screen
from callbacks.writing import save_figure, table_csv, write_text

__all__ = ["Row", "finetuning_table", "show_finetuning", "summarise", "write_finetuning"]

Row = dict[str, Any]


def write_finetuning(folder: Path, meta: Row, rows: Sequence[Row]) -> list[Path]:
    """Write finetuning.json, finetuning.csv and the figure, each whole or not at all.

    Args:
        folder: of the run.
        meta: what holds for all classifiers.
        rows: one for each classifier that is finished.

    Returns:
        The figures' paths.
    """
    whole = {"meta": meta, "rows": list(rows), "summary": summarise(rows)}
    write_text(folder / "finetuning.json", json.dumps(whole, indent=1, allow_nan=False))
    write_text(folder / "finetuning.csv", table_csv(rows))
    save_figure(finetuning_figure(rows, meta["majority_accuracy"]), folder / "finetuning.png")
    return [folder / "finetuning.png"]


def summarise(rows: Sequence[Row]) -> list[Row]:
    """For each variant, over its seeds and bases: mean accuracy, its standard deviation, mean loss and time."""
    summary = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == variant]
        accuracies = [row["accuracy"] for row in own]
        summary.append(
            {
                "variant": variant,
                "kind": own[0]["kind"],
                "count": own[0]["count"],
                "n": len(own),
                "accuracy": mean(accuracies),
                "accuracy_sd": stdev(accuracies) if len(own) > 1 else None,
                "loss": mean(row["loss"] for row in own),
                "seconds": mean(row["seconds"] for row in own),
                "trained": own[0]["trained"],
            }
        )
    return summary


def finetuning_table(rows: Sequence[Row], majority: float) -> Table:
    """Test accuracy by variant, the majority class last."""
    table = TitledTable(f"Accuracy on {rows[0]['n_texts']} held-out texts")
    table.add_column("variant", no_wrap=True)
    for heading in ("classifiers", "accuracy %", "± sd", "loss", "seconds", "weights trained"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in summarise(rows):
        table.add_row(
            row["variant"],
            str(row["n"]),
            f"{100 * row['accuracy']:.1f}",
            "" if row["accuracy_sd"] is None else f"{100 * row['accuracy_sd']:.1f}",
            f"{row['loss']:.3f}",
            f"{row['seconds']:.0f}",
            f"{row['trained']:,}",
        )
    table.add_row("majority class", "", f"{100 * majority:.1f}", style="dim")
    return table


def show_finetuning(trainer: pl.Trainer, folder: Path, meta: Row, rows: Sequence[Row], figures: Sequence[Path]) -> None:
    """The table on screen, and everything to W&B where the run has it."""
    console = screen()
    console.print(finetuning_table(rows, meta["majority_accuracy"]))
    wandb = log_to_wandb(trainer, "finetuning", meta, rows, figures)
    say_where(console, folder, wandb, "Classifiers, report and figure")
