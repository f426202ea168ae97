"""Pictures: SVG files become part of the page, with its colours in light and dark; PNG files scroll on a phone."""

import io
import re
from collections.abc import Callable
from html import escape
from pathlib import Path

from PIL import Image

__all__ = ["with_drawings", "with_figures"]

IMAGE = re.compile(r"^!\[(.+)\]\((.+\.svg)\)$", re.MULTILINE)
FIGURE = re.compile(r"^!\[(.+)\]\((.+\.png)\)$", re.MULTILINE)
READABLE = 0.55  # of a figure's width in pixels, below which its letters are too small, as on the pages of reports
STYLE = re.compile(r"<style>.*?</style>\n?", re.DOTALL)


def with_drawings(markdown: str, folder: Path) -> str:
    """Put each SVG in the place of the line that shows it.

    Args:
        markdown: markdown of a page.
        folder: that of the page.
    """

    def inline(found: re.Match[str]) -> str:
        alone = STYLE.sub(
            "", (folder / found[2]).read_text(encoding="utf-8")
        )  # colours where there is no page around it
        drawing = alone.replace(
            "<svg ", f'<svg role="img" aria-label="{escape(found[1])}" ', 1
        )
        return f'<div class="drawing">\n{drawing}</div>'

    return IMAGE.sub(inline, markdown)


def with_figures(markdown: str, image: Callable[[str], bytes]) -> str:
    """Put each PNG into a box, where a narrow screen shows it as large as it can be read, and scrolls it.

    Args:
        markdown: markdown of a page.
        image: returns the PNG of a path that the page names.
    """

    def boxed(found: re.Match[str]) -> str:
        with Image.open(io.BytesIO(image(found[2]))) as opened:
            width, height = opened.size
        label, least = escape(f"Figure: {found[1]}"), int(READABLE * width)
        size = f'width="{width}" height="{height}" style="--least: {least}px"'
        box = f'<div class="figure" tabindex="0" role="region" aria-label="{label}" markdown>'
        return f"{box}\n\n{found[0]}{{ {size} }}\n\n</div>"

    return FIGURE.sub(boxed, markdown)
