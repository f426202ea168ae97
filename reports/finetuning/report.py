"""The report of a fine-tuning: JSON, CSV, a figure, a table on screen, W&B."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import lightning.pytorch as pl
from rich.table import Table

from reports.finetuning.figures import finetuning_figure
from reports.score_words import floor_words, score_heading, score_words
from reports.showing import TitledTable, log_to_wandb, say_where, screen
from reports.writing import save_figure, table_csv, write_text

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
    save_figure(finetuning_figure(rows, meta["majority_score"]), folder / "finetuning.png")
    return [folder / "finetuning.png"]


def summarise(rows: Sequence[Row]) -> list[Row]:
    """For each variant, over its seeds and bases: mean score and accuracy, their standard deviations, loss and time."""
    summary = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == variant]
        summary.append(
            {
                "variant": variant,
                "kind": own[0]["kind"],
                "count": own[0]["count"],
                "n": len(own),
                "score_name": own[0]["score_name"],
                **_spread(own, "score"),
                **_spread(own, "accuracy"),
                "loss": mean(row["loss"] for row in own),
                "seconds": mean(row["seconds"] for row in own),
                "trained": own[0]["trained"],
            }
        )
    return summary


def _spread(rows: Sequence[Row], column: str) -> Row:
    """Mean and standard deviation; none where a row has no such figure."""
    values = [row[column] for row in rows if row[column] is not None]
    whole = len(values) == len(rows)
    return {
        column: mean(values) if whole else None,
        f"{column}_sd": stdev(values) if whole and len(values) > 1 else None,
    }


def finetuning_table(rows: Sequence[Row], majority: float) -> Table:
    """The score by variant, and last that of the majority class, or of the mean of numbers."""
    words = score_words(rows)
    table = TitledTable(f"{words[0].upper()}{words[1:]} on {rows[0]['n_texts']} held-out texts")
    table.add_column("variant", no_wrap=True)
    for heading in ("classifiers", score_heading(rows), "± sd", "loss", "seconds", "weights trained"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in summarise(rows):
        table.add_row(
            row["variant"],
            str(row["n"]),
            *("" if row[name] is None else f"{100 * row[name]:.1f}" for name in ("score", "score_sd")),
            f"{row['loss']:.3f}",
            f"{row['seconds']:.0f}",
            f"{row['trained']:,}",
        )
    table.add_row(floor_words(rows), "", f"{100 * majority:.1f}", style="dim")
    return table


def show_finetuning(trainer: pl.Trainer, folder: Path, meta: Row, rows: Sequence[Row], figures: Sequence[Path]) -> None:
    """The table on screen, and everything to W&B where the run has it."""
    console = screen()
    console.print(finetuning_table(rows, meta["majority_score"]))
    wandb = log_to_wandb(trainer, "finetuning", meta, rows, figures)
    say_where(console, folder, wandb, "Classifiers, report and figure")
