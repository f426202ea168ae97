"""What the demo says at its end, in plain words with its own numbers."""

from collections.abc import Sequence

from aligners.fitting.training_status import what_did_not_train
from aligners.reports.report import Row, grouped
from aligners.reports.templates import words


def demo_words(language: Sequence[Row], classifiers: Sequence[Row] = ()) -> list[str]:
    """Say in a few lines what was found.

    Args:
        language: rows of the report of the two language models.
        classifiers: rows of that of the two classifiers, if there are any.
    """
    methods = grouped(language, "method")
    lines = words("demo", language=methods, classifiers=grouped(classifiers, "method")).splitlines()
    return [
        *lines,
        *what_did_not_train([row for name in ("mlp", "inn") for row in methods.get(name, [])]),
    ]
