"""What the demo says at its end, in plain words with its own numbers."""

from collections.abc import Mapping, Sequence

from aligners.fitting.outcomes import mark, what_did_not_train, worst_of
from aligners.reports.names import value_range
from aligners.reports.report import Row, grouped
from aligners.reports.templates import words


def demo_words(language: Sequence[Row], classifiers: Sequence[Row] = ()) -> list[str]:
    """Say in a few lines what was found.

    Args:
        language: rows of the report of the two language models.
        classifiers: rows of that of the two classifiers, if there are any.
    """
    methods = grouped(language, "method")
    lines = words("demo", language=methods, classifiers=grouped(classifiers, "method"), span=_span).splitlines()
    return [*lines, *what_did_not_train([row for name in ("mlp", "inn") for row in methods.get(name, [])])]


def _span(methods: Mapping[str, Sequence[Row]], name: str, column: str, form: str) -> str:
    """The least and the largest value of a method at any site, marked if it is not trained at one of them."""
    values = [row[column] for row in methods.get(name, ()) if row[column] is not None]
    text = value_range(values, form) if values else "not known"
    return mark(text, worst_of(methods[name])) if name in methods else text
