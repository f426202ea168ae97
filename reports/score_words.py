"""How reports call the score of a task; every score is shown in hundredths, as GLUE does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["floor_words", "score_heading", "score_name", "score_words"]

WORDS = {
    "accuracy": "accuracy in %",
    "mcc": "Matthews correlation × 100",
    "f1": "F1 × 100",
    "pearson": "Pearson correlation × 100",
    "spearman": "Spearman correlation × 100",
}
HEADINGS = {"accuracy": "acc. %", "mcc": "MCC × 100", "f1": "F1 × 100", "pearson": "r × 100", "spearman": "ρ × 100"}


def score_name(rows: Sequence[dict[str, Any]]) -> str:
    """The score of the first row that has one."""
    return next((row["score_name"] for row in rows if row.get("score_name")), "accuracy")


def score_words(rows: Sequence[dict[str, Any]]) -> str:
    """What an axis or a title says of rows: "accuracy in %", "Matthews correlation × 100"."""
    return WORDS[score_name(rows)]


def score_heading(rows: Sequence[dict[str, Any]]) -> str:
    """The same, short: above a column."""
    return HEADINGS[score_name(rows)]


def floor_words(rows: Sequence[dict[str, Any]]) -> str:
    """What is answered to every text alike, as a floor: the majority class, or the mean of numbers."""
    return "mean number" if score_name(rows) in ("pearson", "spearman") else "majority class"
