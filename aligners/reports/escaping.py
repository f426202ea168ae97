"""Escapes text from models, files and options for each kind of output, so that nothing in it acts as syntax.

HTML is escaped by Jinja, LaTeX by `aligners.reports.study.study_report`, what is printed by `aligners.errors.visible`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from aligners.errors import visible
from aligners.reports.report import Row

if TYPE_CHECKING:
    import pandas as pd

FORMULA = (
    "=",
    "+",
    "-",
    "@",
    "\t",
    "\r",
)  # how cells begin that a spreadsheet computes
IN_MARKDOWN = re.compile(
    r"<|(?<=\])(?=\()"
)  # how HTML begins, and the middle of a link


def csv_text(rows: Sequence[Row]) -> str:
    """Write rows with the same keys as CSV."""
    import pandas as pd

    return str(
        csv_frame(pd.DataFrame(rows, dtype=object)).to_csv(
            index=False, lineterminator="\r\n"
        )
    )


def csv_frame(frame: pd.DataFrame) -> pd.DataFrame:
    """Make a table safe for CSV: no cell and no heading is a formula."""
    from pandas.api.types import is_numeric_dtype

    plain = frame.rename(columns=csv_cell)
    for place, kind in enumerate(plain.dtypes):
        if not is_numeric_dtype(kind):
            name = plain.columns[place]
            plain[name] = plain[name].map(csv_cell)
    return plain


def csv_cell(value: Any) -> Any:
    """Make a value safe for a cell of CSV: a text that a spreadsheet would compute begins with an apostrophe."""
    if not isinstance(value, str):
        return value
    shown = visible(value)
    return f"'{shown}" if value.startswith(FORMULA) and not _is_number(value) else shown


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def in_markdown(text: str) -> str:
    """Make a text safe for Markdown: no link, image or HTML; its code and its emphasis stay."""
    return IN_MARKDOWN.sub(r"\\\g<0>", visible(text))


def in_cell(text: str) -> str:
    """Make a text safe for a cell of a Markdown table, in one line."""
    return in_markdown(" ".join(text.split())).replace("|", "\\|")


def markdown_table(
    headings: Iterable[str], rows: Iterable[Sequence[str]], rule: str
) -> list[str]:
    """Return the lines of a table in Markdown: headings, the rule below them, rows."""
    lines = []
    for cells in (headings, *rows):
        lines.append("| " + " | ".join(map(in_cell, cells)) + " |")
    return [lines[0], rule, *lines[1:]]
