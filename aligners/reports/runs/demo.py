"""What the demo says at its end, in plain words with its own numbers."""

from __future__ import annotations

from collections.abc import Sequence

from aligners.fitting.outcomes import mark, what_did_not_train, worst_of
from aligners.reports.report import Row


def demo_words(language: Sequence[Row], classifiers: Sequence[Row]) -> list[str]:
    """Say in a few lines what was found.

    Args:
        language: rows of the report of the two language models.
        classifiers: rows of that of the two classifiers.
    """
    (own,) = (row["loss"] for row in language if row["method"] == "native_y")
    (right,) = (row["accuracy"] for row in classifiers if row["method"] == "native_y")
    return [
        "Two language models that differ in nothing but the seed; the states of the first were put into the second.",
        f"By itself the second loses {own:.2f} nats a token. With the first's states after a block, it loses more by",
        f"  as they are                      {_span(language, 'identity', 'penalty', '{:z.2f}')}",
        f"  turned, by a rotation            {_span(language, 'procrustes', 'penalty', '{:z.2f}')}",
        f"  mapped by an invertible network  {_span(language, 'inn', 'penalty', '{:z.2f}')}",
        f"Of the variance that network leaves {_span(language, 'inn', 'fvu_seen', '{:z.2f}')} unexplained on words "
        f"that it was fitted on, {_span(language, 'inn', 'fvu_unseen', '{:z.2f}')} on others.",
        f"A classifier is right on {right:.0%} of the texts by itself; {_span(classifiers, 'identity', 'accuracy')} "
        f"with another's states as they are, {_span(classifiers, 'linear', 'accuracy')} mapped linearly.",
        *what_did_not_train([row for row in language if row["method"] == "inn"]),
    ]


def _span(rows: Sequence[Row], method: str, column: str, form: str = "{:.0%}") -> str:
    """The least and the largest value of a method at any site, marked if it is not trained at one of them."""
    own = [row for row in rows if row["method"] == method]
    values = [row[column] for row in own if row[column] is not None]
    ends = [form.format(end) for end in (min(values), max(values))] if values else ["not known"]
    said = " to ".join(dict.fromkeys(ends))
    return mark(said, worst_of(own)) if own else said
