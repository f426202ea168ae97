"""The report of a fine-tuning: every classifier, and their summary by variant."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean, stdev

from rich.table import Table

from reports.finetuning.figures import finetuning_figure
from reports.report import Report, Row
from reports.screen import site_table
from reports.words import floor_words, score_heading, score_words

__all__ = ["finetuning_table", "report", "summarise"]


def report(meta: Row, rows: Sequence[Row]) -> Report:
    """Make it from one row for each classifier that is finished."""
    return Report(
        "finetuning",
        meta,
        rows,
        tables={"summary": summarise(rows)},
        figures={"finetuning": partial(finetuning_figure, rows, meta["majority_score"])},
        screen=[finetuning_table(rows, meta["majority_score"])],
        files="Classifiers, report and figure",
    )


def summarise(rows: Sequence[Row]) -> list[Row]:
    """One row for each variant: means over its seeds and bases, and standard deviations of score and accuracy."""
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
    """Mean and standard deviation of a column; None if some row lacks it."""
    values = [row[column] for row in rows if row[column] is not None]
    whole = len(values) == len(rows)
    return {
        column: mean(values) if whole else None,
        f"{column}_sd": stdev(values) if whole and len(values) > 1 else None,
    }


def finetuning_table(rows: Sequence[Row], majority: float) -> Table:
    """The score by variant, and in the last line that of the majority class, or of the mean number."""
    words = score_words(rows)
    title = f"{words[0].upper()}{words[1:]} on {rows[0]['n_texts']} held-out texts"
    columns = ["classifiers", score_heading(rows), "± sd", "loss", "seconds", "weights trained"]
    table = site_table(title, ["variant"], columns, {})
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
