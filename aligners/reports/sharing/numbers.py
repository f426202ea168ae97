"""The numbers of a card: of each kind of report the columns that a stranger needs, with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from aligners.reports.names import site_name, with_short_names
from aligners.reports.report import Report, Row

__all__ = ["Numbers", "numbers_of"]

MOST_ROWS = 80
LABELS = ("route", "task", "method", "role", "source", "site", "rank")
VALUES = {
    "parameters": "parameters",
    "fvu": "FVU",
    "fvu_seen": "FVU, seen types",
    "fvu_unseen": "FVU, unseen types",
    "fvu_inverse": "FVU of the inverse",
    "penalty": "penalty, nats",
    "score": "score",
    "control": "control task",
    "selectivity": "selectivity",
    "uuas": "UUAS",
    "cycle": "cycle error",
}


class Numbers(NamedTuple):
    """A table of numbers as text.

    Attributes:
        headings: of its columns.
        rows: cells, a number with its 95 % interval where it has one.
        left_out: rows that are not shown.
        intervals: whether any number has an interval.
    """

    headings: list[str]
    rows: list[list[str]]
    left_out: int
    intervals: bool


def numbers_of(report: Report) -> Numbers:
    """The table: floors and ceilings stand among the methods, as their role says."""
    shown = with_short_names(report.rows)
    labels = [
        name for name in ("route", "task", "method", "role", "source", "site", "rank") if _told_apart(shown, name)
    ]
    values = [name for name in VALUES if any(row.get(name) is not None for row in shown)]
    scores = list(dict.fromkeys(row["score_name"] for row in shown if row.get("score_name")))
    headings = labels + [scores[0] if name == "score" and len(scores) == 1 else VALUES[name] for name in values]
    rows = [[*(_label(row, name) for name in labels), *(_value(row, name) for name in values)] for row in shown]
    bounds = any(row.get(f"{name}_low") is not None for row in shown for name in values)
    return Numbers(headings, rows[:MOST_ROWS], max(0, len(rows) - MOST_ROWS), bounds)


def _told_apart(rows: Sequence[Row], name: str) -> bool:
    """Whether a label is there; of one route alone, it says nothing."""
    found = {_label(row, name) for row in rows}
    return found != {""} and (name != "route" or len(found) > 1)


def _label(row: Row, name: str) -> str:
    if name == "route":
        return f"{row['model_x']} → {row['model_y']}" if "model_x" in row else str(row.get("model", ""))
    if name == "site" and row.get("site_x") is not None:
        return site_name((row["site_x"], row["site_y"]))
    value = row.get(name)
    return "" if value is None else str(value)


def _value(row: Row, name: str) -> str:
    value, low, high = (row.get(key) for key in (name, f"{name}_low", f"{name}_high"))
    if value is None:
        return ""
    return _short(value) if low is None or high is None else f"{_short(value)} [{_short(low)}, {_short(high)}]"


def _short(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 100 else f"{value:.1e}"
