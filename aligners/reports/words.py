"""Words that reports share: names of scores, which are shown in hundredths, lists and ranges."""

from __future__ import annotations

import re
from collections.abc import Sequence

from aligners.reports.report import Row

__all__ = [
    "fixed", "floor_words", "held_out_name", "listed", "score_heading", "score_name", "score_words", "value_range",
]  # fmt: skip

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


def held_out_name(text: Row) -> str | None:
    """The file or the split that the held-out texts of a report are, where they are not drawn from those to fit on."""
    found = re.match("test: (.*?)(;|$)", str(text.get("split", "")))
    return found and found[1]


def fixed(value: float, form: str) -> str:
    """Format a number, whose rounding to zero has no sign: 0.000, not -0.000."""
    sign = form[: len(form) - len(form.lstrip("+- "))]
    return format(value, form if form == "d" or "z" in form else f"{sign}z{form.removeprefix(sign)}")


def value_range(values: Sequence[float], form: str) -> str:
    """`0.100 to 0.200`, or one number if both ends read the same."""
    low, high = fixed(min(values), form), fixed(max(values), form)
    return low if low == high else f"{low} to {high}"


def listed(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]
