"""Templates: of the pages of reports, with style and script inlined, and of what reports say in words."""

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from aligners.reports.names import held_out_name, listed, site_name, value_range

HERE = Path(__file__).parent
PAGES = HERE / "page"
ITEM = re.compile("^- ", re.MULTILINE)
BEFORE_PUNCTUATION = re.compile(r" (?=[.,;:)](?: |$|[.,;:]))")  # a space that a line's end in a template leaves


def page(template: str, **values: Any) -> str:
    """Render the template of a page.

    Args:
        template: name of its file.
        values: of the template.
    """
    environment = Environment(loader=FileSystemLoader(PAGES), autoescape=True, keep_trailing_newline=True)
    environment.filters["code"] = _code
    css, js = (Markup((PAGES / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    return environment.get_template(template).render(css=css, js=js, **values)


def sentences(template: str, **values: Any) -> list[str]:
    """Render findings: the items of the list that a template of `findings/` is, each in one line.

    Filters: `form` writes a number as `format` does, `span` the range of a column of rows, `listed` a list, `last_part`
    that of a path.

    Args:
        template: name of its file, without the ending.
        values: of the template.
    """
    items = ITEM.split(words(template, **values))[1:]
    return [BEFORE_PUNCTUATION.sub("", " ".join(item.split())) for item in items]


def words(template: str, **values: Any) -> str:
    """Render a template of `findings/` as it is; see `sentences`."""
    environment = Environment(loader=FileSystemLoader(HERE / "findings"), undefined=StrictUndefined)
    environment.filters |= {"form": format, "listed": listed, "site_name": site_name, "span": _span}
    environment.filters |= {"held_out_name": held_out_name, "last_part": lambda path: Path(str(path)).name}
    return environment.get_template(f"{template}.j2").render(**values)


def _span(rows: Any, column: str, form: str) -> str:
    return value_range([row[column] for row in rows], form)


def _code(text: str) -> Markup:
    """A sentence, what stands between backticks as code."""
    parts = [escape(part) for part in text.split("`")]
    if len(parts) % 2 == 0:  # a backtick alone is one
        return escape(text)
    return Markup("").join(Markup("<code>{}</code>").format(part) if n % 2 else part for n, part in enumerate(parts))
