"""The report of surgery: the score of every truncation and every skipped span."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.table import Table

from finetuning.truncating import MEAN
from reports.names import with_short_names
from reports.report import Report, Row
from reports.screen import site_table
from reports.surgery.figures import skipping_figure, truncation_figure
from reports.words import floor_words, score_words

__all__ = ["report", "surgery_table"]


def report(meta: Row, rows: Sequence[Row]) -> Report:
    """Make it from one row for each model and condition."""
    shown, majority = with_short_names(rows), meta["majority_score"]
    return Report(
        "surgery",
        meta,
        rows,
        figures={
            "truncation": partial(truncation_figure, shown, majority),
            "skipping": partial(skipping_figure, shown, majority),
        },
        screen=[surgery_table(shown, majority)],
    )


def surgery_table(rows: Sequence[Row], majority: float) -> Table:
    """The score of every truncation by site, for each model and for their mean."""
    cut = [row for row in rows if row["site"] is not None and row["kind"] != "native"]
    words = score_words(rows)
    title = (
        f"{words[0].upper()}{words[1:]} of models truncated after a site, on {rows[0]['n_texts']} held-out texts "
        f"({floor_words(rows)}: {100 * majority:.1f})"
    )
    sites = sorted({row["site"] for row in cut})
    table = site_table(title, ["model", "head"], [], {"": [str(site) for site in sites]})
    for model, kind in dict.fromkeys((row["model"], row["kind"]) for row in cut):
        own = {row["site"]: row["score"] for row in cut if (row["model"], row["kind"]) == (model, kind)}
        cells = ["" if own.get(site) is None else f"{100 * own[site]:.1f}" for site in sites]
        table.add_row(model, kind, *cells, style="bold" if model == MEAN else None)
    return table
