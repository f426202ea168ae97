"""What all pages of reports share: templates, style, script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

__all__ = ["rendered"]

HERE = Path(__file__).parent


def rendered(template: str, *further: Path, **values: Any) -> str:
    """Render a template, with style and script inlined.

    Args:
        template: name of its file.
        further: folders with templates, beside this one.
        values: of the template.
    """
    environment = Environment(
        loader=FileSystemLoader([HERE, *further]), autoescape=True, trim_blocks=False, keep_trailing_newline=True
    )
    environment.filters["code"] = _code
    css, js = (Markup((HERE / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    return environment.get_template(template).render(css=css, js=js, **values)


def _code(text: str) -> Markup:
    """A sentence, what stands between backticks as code."""
    parts = [escape(part) for part in text.split("`")]
    if len(parts) % 2 == 0:  # a backtick alone is one
        return escape(text)
    return Markup("").join(Markup("<code>{}</code>").format(part) if n % 2 else part for n, part in enumerate(parts))
