"""The report of an injection: errors, and what the model does with mapped states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from rich.table import Table

from aligners.fitting.outcomes import mark
from aligners.reports.injection.figures import accuracy_figure, fvu_figure, penalty_figure
from aligners.reports.injection.words import (
    below_chance,
    of_tokens,
    panel_title,
    panels_of,
    price_of_bijectivity,
    reading,
)
from aligners.reports.names import site_name, with_short_names
from aligners.reports.report import Report, Row
from aligners.reports.screen import site_table
from aligners.reports.words import score_heading

__all__ = ["console_tables", "left_out", "report"]

FIGURES = {"penalty": penalty_figure, "fvu": fvu_figure, "accuracy": accuracy_figure}
DRAWN = {"penalty": "perplexity", "fvu": "fvu", "accuracy": "score"}  # the column of each figure
COLUMN_GROUPS = {
    "penalty": ("penalty", False),  # of language models
    "fvu": ("FVU", False), "fvu_unseen": ("unseen", False), "fvu_other": ("other", False),
    "fvu_inverse": ("inverse", False), "score": ("", True),  # see score_heading
}  # fmt: skip
MOST_NUMBERS_ABREAST = 12
MARKDOWN_COLUMNS = {
    "model_x": "from", "model_y": "into", "rows": "rows", "site_x": "site", "method": "method",
    "training": "training", "parameters": "parameters",
    "fvu": "FVU", "fvu_seen": "FVU of seen types", "fvu_unseen": "FVU of unseen types",
    "fvu_other": "FVU on other text", "fvu_inverse": "FVU of the inverse", "mse": "mse", "cosine": "cosine",
    "round_trip": "round trip", "accuracy": "accuracy", "score_name": "score", "score": "value", "score_low": "low",
    "score_high": "high", "loss": "loss", "penalty": "penalty", "penalty_low": "penalty low",
    "penalty_high": "penalty high", "perplexity": "perplexity", "agreement": "agreement",
}  # fmt: skip


def report(meta: Row, rows: Sequence[Row]) -> Report:
    """Make the report from one row for each method, site, direction and kind of rows."""
    shown = with_short_names(rows)
    drawn = [name for name in FIGURES if any(row.get(DRAWN[name]) is not None for row in rows)]
    return Report(
        "report",
        {**meta, "price_of_bijectivity": price_of_bijectivity(rows), "below_chance": below_chance(rows)},
        rows,
        columns=MARKDOWN_COLUMNS,
        figures={name: partial(FIGURES[name], shown) for name in drawn},
        screen=console_tables(shown),
        sentences=[*reading(shown).splitlines(), *left_out(meta)],
    )


def left_out(meta: Row) -> list[str]:
    """Say what was asked for but not measured."""
    missing = [f"Nothing was injected {direction}: {why}." for direction, why in meta.get("not_injected", {}).items()]
    return missing + [f"Left out, {name}: {why}" for name, why in meta.get("refusals", {}).items()]


def console_tables(rows: Sequence[Row]) -> list[Table]:
    """Make tables for each direction and kind of rows: methods down, sites across.

    Groups of columns are the penalty of language models, FVU, FVU on unseen types and on other text, FVU of the
    inverse, and the score. They stand side by side as far as they fit on a screen, and below each other where there are
    many sites. A group without numbers is left out.
    """
    tables = []
    for panel in panels_of(rows):
        pairs = list(dict.fromkeys((row["site_x"], row["site_y"]) for row in panel if row["site_x"] is not None))
        groups = [group for group in COLUMN_GROUPS if group != "penalty" or of_tokens(panel)]
        filled = [group for group in groups if any(row.get(group) is not None for row in panel)]
        count = math.ceil(len(filled) / max(1, MOST_NUMBERS_ABREAST // len(pairs)))
        together = [list(part) for part in np.array_split(filled, count)]
        tables += [_table(panel, pairs, panel_title(panel), groups) for groups in together]
    return tables


def _table(panel: list[Row], pairs: list[tuple[int, int]], title: str, groups: list[str]) -> Table:
    sites = {COLUMN_GROUPS[group][0] or score_heading(panel): [site_name(pair) for pair in pairs] for group in groups}
    table = site_table(title, ["method"], ["parameters"], sites)
    for name in dict.fromkeys(row["method"] for row in panel):
        line = {(row["site_x"], row["site_y"]): row for row in panel if row["method"] == name}
        first = next(iter(line.values()))
        cells = [
            mark(_short(line.get(pair, first)[group], COLUMN_GROUPS[group][1]), line.get(pair, first))
            for group in groups
            for pair in pairs
        ]
        parameters = f"{first['parameters']:,}" if first["parameters"] else ""
        table.add_row(name, parameters, *cells, style={"ceiling": "green", "floor": "dim"}.get(first["role"]))
    return table


def _short(value: float | None, percent: bool) -> str:
    if value is None:
        return ""
    if percent:
        return f"{100 * value:.1f}"
    return f"{value:.0e}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"
