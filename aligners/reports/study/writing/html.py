"""A study's report as one HTML file that needs nothing else: no network, no other file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from aligners.reports.page.templates import rendered
from aligners.reports.report import Row
from aligners.reports.study.contents import Figure, Table
from aligners.reports.study.drawing import interactive
from aligners.reports.study.drawing.colours import Palette
from aligners.reports.study.provenance import Provenance
from aligners.reports.study.registry import Made
from aligners.reports.study.writing.cells import written

__all__ = ["page"]

HERE = Path(__file__).parent
MOST_VALUES = 400  # rows of a figure's table; all are in its CSV file


def page(name: str, made: Made, provenance: Provenance, images: dict[str, Path], palette: Palette) -> str:
    """Write the page.

    Args:
        name: of the study.
        made: tables and figures.
        provenance: what the study ran.
        images: figure's name -> its PNG file, embedded where plotly is not installed.
        palette: of the report.
    """
    return rendered(
        "study.html.j2",
        HERE,
        title=f"Study {name}",
        about=provenance.said(),
        findings=made.findings(),
        tables=[_table(table) for table in made.tables],
        figures=[_figure(figure, images[figure.name], palette) for figure in made.figures],
        missing=made.missing,
        plotly=Markup(interactive.script()) if interactive.PLOTLY and made.figures else None,
        **provenance.shown(),
    )


def _table(table: Table) -> dict[str, Any]:
    rows = [[written(row.get(column.key), column) for column in table.columns] for row in table.rows]
    return {"table": table, "headings": [column.heading for column in table.columns], "rows": rows}


def _figure(figure: Figure, image: Path, palette: Palette) -> dict[str, Any]:
    keys = list(figure.values[0]) if figure.values else []
    shown = {
        "figure": figure,
        "headings": keys,
        "lines": [_texts(row, keys) for row in figure.values[:MOST_VALUES]],
        "more": len(figure.values) if len(figure.values) > MOST_VALUES else 0,
    }
    if interactive.PLOTLY:
        fragment, width = interactive.fragment(figure, palette)
        return {**shown, "fragment": Markup(fragment), "width": width}
    return {**shown, "png": base64.b64encode(image.read_bytes()).decode()}


def _texts(row: Row, keys: Sequence[str]) -> list[str]:
    values = [row.get(key) for key in keys]
    return ["" if value is None or value != value else f"{value:.4g}" if isinstance(value, float) else str(value)
            for value in values]  # fmt: skip
