"""What reports call the score of a task. Scores are shown in hundredths, as GLUE does."""

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
    """Name of the score of the first row that has one; `accuracy` if none has."""
    return next((row["score_name"] for row in rows if row.get("score_name")), "accuracy")


def score_words(rows: Sequence[dict[str, Any]]) -> str:
    """The score for an axis or a title, such as "accuracy in %" or "Matthews correlation × 100"."""
    return WORDS[score_name(rows)]


def score_heading(rows: Sequence[dict[str, Any]]) -> str:
    """The score for the heading of a column, such as "acc. %"."""
    return HEADINGS[score_name(rows)]


def floor_words(rows: Sequence[dict[str, Any]]) -> str:
    """What the floor is called that answers every text alike: the majority class, or the mean number."""
    return "mean number" if score_name(rows) in ("pearson", "spearman") else "majority class"
