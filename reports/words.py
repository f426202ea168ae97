"""Words that reports share: names of scores, which are shown in hundredths, lists and ranges."""

from __future__ import annotations

from collections.abc import Sequence

from reports.report import Row

__all__ = ["floor_words", "listed", "score_heading", "score_name", "score_words", "value_range"]

WORDS = {
    "accuracy": "accuracy in %",
    "mcc": "Matthews correlation × 100",
    "f1": "F1 × 100",
    "pearson": "Pearson correlation × 100",
    "spearman": "Spearman correlation × 100",
}
HEADINGS = {"accuracy": "acc. %", "mcc": "MCC × 100", "f1": "F1 × 100", "pearson": "r × 100", "spearman": "ρ × 100"}


def score_name(rows: Sequence[Row]) -> str:
    """Return the name of the first score in the rows, or `accuracy` if there is none."""
    return next((row["score_name"] for row in rows if row.get("score_name")), "accuracy")


def score_words(rows: Sequence[Row]) -> str:
    """Name the score for an axis or a title, such as "accuracy in %" or "Matthews correlation × 100"."""
    return WORDS[score_name(rows)]


def score_heading(rows: Sequence[Row]) -> str:
    """Name the score for the heading of a column, such as "acc. %"."""
    return HEADINGS[score_name(rows)]


def floor_words(rows: Sequence[Row]) -> str:
    """Name the floor that gives every text the same answer: the majority class, or the mean number."""
    return "mean number" if score_name(rows) in ("pearson", "spearman") else "majority class"


def value_range(values: Sequence[float], form: str) -> str:
    """`0.100 to 0.200`, or one number if both ends read the same."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def listed(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]
