"""The HTML pages of reports, from templates, each with a glossary of the words that occur on it."""

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from aligners.files.yaml_tables import table_beside
from aligners.reports.names import four_digits

PAGES = Path(__file__).parent / "page"
GLOSSARY: dict[str, str] = table_beside(__file__, "glossary.yaml")
NO_WORDS = re.compile("<(script|style|pre).*?</\\1>|<[^>]*>", re.DOTALL)  # of a page


def page(template: str, **values: Any) -> str:
    """Render the template of a page, with a glossary of the words that occur on it.

    Args:
        template: name of its file.
        values: values of the template.
    """
    loader = FileSystemLoader(PAGES)
    environment = Environment(
        loader=loader, autoescape=True, keep_trailing_newline=True
    )
    environment.filters |= {"code": _code, "four_digits": four_digits}
    whole = environment.get_template(template)
    words = NO_WORDS.sub(" ", whole.render(glossary={}, **values))
    return whole.render(glossary=glossary(words), **values)


def glossary(text: str) -> dict[str, str]:
    """Return the terms of `glossary.yaml` that occur in a text, in singular or plural, with their definitions."""
    found = {}
    for term, definition in GLOSSARY.items():
        names = "|".join(map(re.escape, term.split(" / ")))
        if re.search(rf"(?<![\w-])({names})s?(?![\w-])", text, re.IGNORECASE):
            found[term] = definition
    return found


def _code(text: str) -> Markup:
    """Mark text between backticks as code; a single backtick is kept."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(text))))
