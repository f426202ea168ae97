"""Templates: of the pages of reports, with style and script inlined, and of what reports say in words."""

import math
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from aligners.files.yaml_tables import table_beside
from aligners.fitting.training_status import MARK, no_better_than_the_mean, trained_methods
from aligners.reports.closest import known_lines, with_training
from aligners.reports.names import (
    WORDS,
    fixed,
    four_digits,
    held_out_name,
    listed,
    plain_number,
    site_name,
    value_range,
)
from aligners.reports.report import Row, distinct, grouped, mean, where
from aligners.similarity.controls import matching_layers

HERE = Path(__file__).parent
ITEM = re.compile("^- ", re.MULTILINE)
GLOSSARY: dict[str, str] = table_beside(__file__, "glossary.yaml")
WORD = r"(?<![\w-])(%s)s?(?![\w-])"
FILTERS = (
    held_out_name,
    listed,
    mean,
    no_better_than_the_mean,
    site_name,
    trained_methods,
    where,
)  # by their names
NO_WORDS = re.compile("<(script|style|pre).*?</\\1>|<[^>]*>", re.DOTALL)  # of a page
BEFORE_PUNCTUATION = re.compile(
    r" (?=[.,;:)](?: |$|[.,;:]))"
)  # a space that a line's end in a template leaves


def page(template: str, **values: Any) -> str:
    """Render the template of a page, with a glossary of the words that occur on it.

    Args:
        template: name of its file.
        values: of the template.
    """
    environment = Environment(
        loader=FileSystemLoader(HERE / "page"), autoescape=True, keep_trailing_newline=True
    )
    environment.filters |= {"code": _code, "four_digits": four_digits}
    whole = environment.get_template(template)
    words = NO_WORDS.sub(" ", whole.render(glossary={}, **values))
    return whole.render(glossary=glossary(words), **values)


def glossary(text: str) -> dict[str, str]:
    """The terms of `glossary.yaml` that occur in a text, in the plural too, with their definitions."""
    names = {term: "|".join(map(re.escape, term.split(" / "))) for term in GLOSSARY}
    return {
        term: GLOSSARY[term] for term in names if re.search(WORD % names[term], text, re.IGNORECASE)
    }


def lead(kind: str, **values: Any) -> str:
    """Say what a report found in two or three sentences, as the template of its kind in `findings/leads/` does."""
    there = (HERE / "findings" / "leads" / f"{kind}.j2").is_file()  # else its sentences come first
    return _in_one_line(words(f"leads/{kind}", **values)) if there else ""


def sentences(template: str, **values: Any) -> list[str]:
    """Render findings: the items of the list that a template of `findings/` is, each in one line.

    Filters: `form` writes a number as `format` does, `number` as people do, `span` the range of a column of rows,
    `listed` a list. `where`, `by` and `mean` choose, group and average rows, `matching` chooses those of matching
    layers, `trained_methods` names the methods that are trained in all rows, and `compared` chooses the rows of those
    that have a value of a column in all of them.

    Args:
        template: name of its file, without the ending.
        values: of the template.
    """
    return [_in_one_line(item) for item in ITEM.split(words(template, **values))[1:]]


def words(template: str, **values: Any) -> str:
    """Render a template of `findings/` as it is; see `sentences`."""
    environment = Environment(loader=FileSystemLoader(HERE / "findings"), undefined=StrictUndefined)
    environment.globals |= {"words": WORDS, "mark": MARK, "with_training": with_training}
    environment.filters |= {"form": fixed, "number": plain_number, "by": grouped}
    environment.filters |= {"matching": _matching, "compared": _compared, "finite": _finite}
    environment.filters["span"] = lambda rows, column, form: value_range(
        [row[column] for row in rows], form
    )
    environment.filters |= {function.__name__: function for function in FILTERS}
    return environment.get_template(f"{template}.j2").render(**values)


def _matching(rows: list[Row]) -> list[Row]:
    """The rows of matching layers of two models."""
    pairs = matching_layers(*(sorted(distinct(rows, column)) for column in ("layer_x", "layer_y")))
    return [row for row in rows if (row["layer_x"], row["layer_y"]) in pairs]


def _compared(rows: list[Row], column: str) -> list[Row]:
    """The rows of those methods that are trained and have a value of a column in all of their rows."""
    every = grouped(rows, "method")
    return [
        row
        for name in trained_methods(rows)
        if math.isfinite(mean(every[name], column))
        for row in every[name]
    ]


def _finite(rows: list[Row], column: str) -> list[Row]:
    """The rows of those methods that have a finite value of a column in all of their rows, trained or not."""
    return [row for line in known_lines(rows, column).values() for row in line]


def _in_one_line(text: str) -> str:
    return BEFORE_PUNCTUATION.sub("", " ".join(text.split()))


def _code(text: str) -> Markup:
    """A sentence, what stands between backticks as code; a backtick alone is one."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(text))))
