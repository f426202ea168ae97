"""Drawings: SVG files that become part of the page, so that they have its colours in light and dark."""

import re
from html import escape
from pathlib import Path

__all__ = ["with_drawings"]

IMAGE = re.compile(r"^!\[(.+)\]\((.+\.svg)\)$", re.MULTILINE)
STYLE = re.compile(r"<style>.*?</style>\n?", re.DOTALL)


def with_drawings(markdown: str, folder: Path) -> str:
    """Put each SVG in the place of the line that shows it.

    Args:
        markdown: of a page.
        folder: that of the page.
    """

    def inline(found: re.Match[str]) -> str:
        alone = STYLE.sub(
            "", (folder / found[2]).read_text(encoding="utf-8")
        )  # colours where there is no page around it
        drawing = alone.replace("<svg ", f'<svg role="img" aria-label="{escape(found[1])}" ', 1)
        return f'<div class="drawing">\n{drawing}</div>'

    return IMAGE.sub(inline, markdown)
