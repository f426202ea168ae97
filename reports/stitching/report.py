"""The report of stitching: JSON, CSV, Markdown, figures, tables on screen, findings in words, W&B."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from rich.table import Table

from aligners.scoring.pair_intervals import check_groups, over_pairs
from aligners.stitching.evaluation import StitchingEvaluation
from reports.names import names_in_full, with_short_names
from reports.score_words import score_heading
from reports.showing import TitledTable, log_to_wandb, say, say_where, screen
from reports.stitching.figures import accuracy_figure, curve_figures, penalty_figure, penalty_map
from reports.stitching.lines import (
    Line,
    averaged,
    is_grid,
    lines_of,
    matching_pairs,
    methods_of,
    site_name,
    what_intervals_are,
)
from reports.stitching.words import findings
from reports.writing import environment, save_figure, table_csv, table_markdown, write_text

__all__ = ["StitchingReport", "stitching_tables", "write_stitching"]

Row = dict[str, Any]
Groups = Mapping[str, Sequence[str]] | None
MOST_SITES_TOGETHER = 3  # penalty and accuracy side by side
LOST = "lost × 100"  # of the score, where lines are means over routes
MOST_SITES_ABREAST = {"penalty": 6, "score": 12}  # either alone
MARKDOWN_COLUMNS = {
    "model_x": "from", "model_y": "into", "site_x": "site", "method": "method", "loss": "loss", "penalty": "penalty",
    "penalty_low": "low", "penalty_high": "high", "accuracy": "accuracy", "score_name": "score", "score": "value",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte", "agreement": "agreement", "fvu": "FVU",
}  # fmt: skip


class StitchingReport(pl.Callback):
    """Writes the report when the evaluation ends, shows it, and logs it to W&B where the run has it.

    Args:
        folder: where.
        groups: name -> models, to average the routes within and between; see `pair_intervals.over_pairs`.
    """

    def __init__(self, folder: Path, groups: Groups = None) -> None:
        self.folder, self.groups = folder, groups

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse groups that do not fit the models before anything is measured."""
        if isinstance(pl_module, StitchingEvaluation):
            check_groups(
                self.groups, (model.name for route in pl_module.routes for model in (route.source, route.target))
            )

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Rank 0 writes; every rank holds the same rows."""
        if not isinstance(pl_module, StitchingEvaluation) or not trainer.is_global_zero:
            return
        rows, meta = pl_module.rows, {**pl_module.meta, **environment(trainer)}
        figures = write_stitching(self.folder, meta, rows, pl_module.curves, self.groups)
        console = screen()
        for table in stitching_tables(rows, self.groups):
            console.print(table)
        say(console, f"±: half of the {what_intervals_are(rows, self.groups)}\n", style="dim")
        for sentence in findings(rows, self.groups):
            say(console, sentence)
        say_where(console, self.folder, log_to_wandb(trainer, "stitching", meta, rows, figures))


def write_stitching(
    folder: Path, meta: dict[str, Any], rows: Sequence[Row], curves: Sequence[Row], groups: Groups = None
) -> list[Path]:
    """Write stitching.json, stitching.csv, stitching.md, curves.csv, pairs.csv and figures, each whole or not at all.

    Args:
        folder: made if need be.
        meta: what holds for all rows.
        rows: one for each route, method and site pair, and one "native" for each route.
        curves: one for each route, method, site pair and step; without any there is no curves.csv.
        groups: of models. Means over pairs go to pairs.csv, and are what is drawn, where there are groups or many
            models.

    Returns:
        The figures' paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pairs = over_pairs(rows, groups) if averaged(rows, groups) else []
    said = findings(rows, groups)
    whole = {"meta": meta, "findings": said, "rows": list(rows), "pairs": pairs, "curves": list(curves)}
    write_text(folder / "stitching.json", json.dumps(whole, indent=1, allow_nan=False))
    for name, table in (("stitching", rows), ("curves", curves), ("pairs", pairs)):
        if table:
            write_text(folder / f"{name}.csv", table_csv(table))
    listed = "".join(f"- {sentence}\n" for sentence in said)
    shown = table_markdown(with_short_names(rows), MARKDOWN_COLUMNS)
    write_text(folder / "stitching.md", f"{shown}\n{listed}{names_in_full(rows)}")
    drawn = {
        "penalty": penalty_figure(rows, groups),
        "accuracy": accuracy_figure(rows, groups),
        "map": penalty_map(rows, groups),
    }
    along = curve_figures(curves, groups)
    for method, figure in along.items():
        drawn["curves" if len(along) == 1 else f"curves_{method}"] = figure
    paths = []
    for name, chart in drawn.items():
        if chart is not None:
            paths.append(folder / f"{name}.png")
            save_figure(chart, paths[-1])
    return paths


def stitching_tables(rows: Sequence[Row], groups: Groups = None) -> list[Table]:
    """For each method routes down and sites across: penalty with half the width of its interval, and the task's score.

    With groups or many models lines are means over the routes of a group, and of the score it is what is lost. Many
    sites make several tables; of a grid the matching sites are shown.
    """
    pairs, lines = matching_pairs(rows), lines_of(rows, groups)
    mean = averaged(rows, groups)
    units = {"penalty": "penalty", "score": LOST if mean else score_heading(rows)}
    blocks = [(list(units.values()), pairs)]
    if len(pairs) > MOST_SITES_TOGETHER:
        blocks = [
            ([units[name]], pairs[start : start + most])
            for name, most in MOST_SITES_ABREAST.items()
            for start in range(0, len(pairs), most)
        ]
    tables = []
    for method in methods_of(rows):
        about = next(row for row in rows if row["method"] == method)
        title = method + (f", {about['fit']}" if about["fit"] not in (None, "none") else "")
        title += f", {about['parameters']:,} parameters a site" if about["parameters"] else ""
        title += ", matching sites" if is_grid(rows) else ""
        tables += [_table(lines, method, shown, title, columns) for columns, shown in blocks]
    return tables


def _table(
    lines: Sequence[Line], method: str, pairs: Sequence[tuple[int, int]], title: str, columns: Sequence[str]
) -> Table:
    table = TitledTable(title)
    table.add_column("\nfrom → into", overflow="fold")
    whole = next((column for column in columns if column not in ("penalty", LOST)), None)
    if whole is not None:
        table.add_column(f"native\n{whole}", justify="right", no_wrap=True)
    for column in columns:
        for place, pair in enumerate(pairs):
            over = f"{column}, nats" if column == "penalty" else column
            table.add_column(f"{over if place == 0 else ''}\n{site_name(pair)}", justify="right", no_wrap=True)
    for line in lines:
        cells = {(row["site_x"], row["site_y"]): row for row in line.rows if row["method"] == method}
        if not cells:
            continue
        native = [f"{100 * row['score']:.1f}" for row in line.rows if row["method"] == "native"]
        texts = [_cell(cells.get(pair), column) for column in columns for pair in pairs]
        table.add_row(line.name, *(native if whole is not None else []), *texts, style="dim" if line.same else None)
    return table


def _cell(row: Row | None, column: str) -> str:
    if row is None:
        return ""
    if column == "penalty":
        if row["penalty"] is None:
            return "overflow"
        digits = 3 if abs(row["penalty"]) < 1 else 2
        return f"{row['penalty']:.{digits}f} ±{(row['penalty_high'] - row['penalty_low']) / 2:.{digits}f}"
    value = row["score_penalty" if column == LOST else "score"]
    return "" if value is None else f"{100 * value:.1f}"
