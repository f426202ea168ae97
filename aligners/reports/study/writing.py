"""Tables and figures of a study as files: one HTML page, LaTeX, Markdown, CSV, and what W&B gets."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from markupsafe import Markup

from aligners.reports.names import fixed, four_digits, markdown_table
from aligners.reports.page.run import models_of
from aligners.reports.report import Row
from aligners.reports.study import drawing
from aligners.reports.study.drawing import Palette
from aligners.reports.study.frames import Cell, Column, Table
from aligners.reports.study.registry import ReportContents
from aligners.reports.study.statistics import Estimate
from aligners.reports.templates import page as rendered

PARTS = ("sd", "low", "high", "interval", "pairs", "models", "lost")  # of an estimate in a CSV file, beside its mean
SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "×": r"$\times$", "−": "$-$", "→": r"$\to$",
    "–": "--", "…": r"\dots{}", "√": r"$\surd$", "Σ": r"$\Sigma$", "²": r"$^2$", "‖": r"$\Vert$", "Δ": r"$\Delta$",
    "[": "{[}", "]": "{]}",  # which end the optional argument of a new line
    "ρ": r"$\rho$", "δ": r"$\delta$", "§": r"\S{}",
}  # fmt: skip
ANY = re.compile("|".join(map(re.escape, SPECIAL)))
LATEX = r"""\begin{table}
\centering
\caption{%s}
\label{tab:%s}
\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%%
\begin{tabular}{%s}
\toprule
%s \\
\midrule
%s
\bottomrule
\end{tabular}}
\end{table}
"""


class Provenance(NamedTuple):
    """What a study ran.

    Attributes:
        config: the study file, resolved; empty if there is none.
        cells: for each kind: kind, cells, hours.
        models: name, revision and fingerprint of every model.
        versions: a line for each set of versions and devices.
        failures: cell -> the last line of its traceback.
    """

    config: str
    cells: list[Row]
    models: list[Row]
    versions: list[str]
    failures: dict[str, str]

    def said(self) -> str:
        """How much the study ran, in a sentence."""
        count = sum(row["cells"] for row in self.cells) + len(self.failures)
        hours = sum(row["hours"] for row in self.cells)
        failed = f", {len(self.failures)} of them failed" if self.failures else ""
        time = f"{hours:.1f} hours" if hours >= 1 else _counted(round(60 * hours), "minute")
        return f"{_counted(count, 'cell')}{failed}, {time} of computing in all."


def provenance_of(folder: Path, collected: Mapping[str, pd.DataFrame]) -> Provenance:
    """Read what the cells say of themselves.

    Args:
        folder: of the study: `study.yaml`, `plan.json` with the ids of its cells, `cells/ID/result.json`,
            `cells/ID/error.txt`; what is not there is left out, and so are cells that are not in the plan.
        collected: kind -> rows, for the number of cells where they left no files.
    """
    config, plan = folder / "study.yaml", folder / "plan.json"
    now = set(_read(plan)) if plan.exists() else None
    cells = [cell for cell in sorted(folder.glob("cells/*")) if now is None or cell.name in now]
    results = [_read(cell / "result.json") for cell in cells if (cell / "result.json").exists()]
    failed = [cell for cell in cells if (cell / "error.txt").exists() and not (cell / "result.json").exists()]
    seconds: dict[str, list[float]] = {}
    for result in results:
        seconds.setdefault(str(result.get("kind", "cells")), []).append(float(result.get("seconds") or 0.0))
    if not seconds:
        seconds = {kind: [0.0] * frame["cell"].nunique() for kind, frame in collected.items() if "cell" in frame}
    metas = [{"versions": result.get("versions"), **(result.get("meta") or {})} for result in results]
    models = {(model.get("name"), model.get("fingerprint")): model for meta in metas for model in models_of(meta)}
    keys = ("name", "revision", "fingerprint")
    return Provenance(
        config=config.read_text(encoding="utf-8") if config.exists() else "",
        cells=[{"kind": kind, "cells": len(each), "hours": sum(each) / 3600} for kind, each in seconds.items()],
        models=sorted(({key: str(model.get(key) or "") for key in keys} for model in models.values()), key=_name),
        versions=[
            f"{said} ({_counted(count, 'cell')})" for said, count in Counter(map(_versions, metas)).items() if said
        ],
        failures={cell.name: _last_line(cell / "error.txt") for cell in failed},
    )


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _name(model: Row) -> str:
    return str(model["name"])


def _versions(meta: Row) -> str:
    """The versions and the device of a cell; nothing if it says none."""
    versions = ", ".join(f"{name} {version}" for name, version in (meta.get("versions") or {}).items())
    device = f"; {meta['device']}, {_counted(meta.get('ranks', 1), 'rank')}" if meta.get("device") else ""
    return versions and versions + device


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no traceback"


class CellText(NamedTuple):
    """A cell as text.

    Attributes:
        value: the number or the words; empty where there is nothing.
        sd: `± sd`, or empty.
        interval: its two ends in brackets, or in braces where they are a mere range; or empty.
        lost: how many pairs are left out, or empty.
        key: what the cell is sorted by.
    """

    value: str
    sd: str = ""
    interval: str = ""
    lost: str = ""
    key: float | str = ""


def written(cell: Cell, column: Column) -> CellText:
    """Write a cell as its column says."""

    def number(value: float) -> str:
        return fixed(value if column.form == "d" else column.scale * value, column.form)

    if cell is None or isinstance(cell, str):
        return CellText(cell or "", key=cell or "")
    if not isinstance(cell, Estimate):
        return CellText(number(cell), key=float(cell))
    interval = ""
    if cell.low is not None and cell.high is not None:
        left, right = "[]" if cell.over_models else "{}"
        interval = f"{left}{number(cell.low)}, {number(cell.high)}{right}"
    sd = "" if cell.sd is None else f"± {number(cell.sd)}"
    lost = f"({cell.lost} of {cell.pairs + cell.lost} pairs lost)" if cell.lost else ""
    return CellText(number(cell.mean), sd, interval, lost, cell.mean)


def plain_cell(cell: Cell, column: Column) -> str:
    """A cell as plain text in one piece."""
    return " ".join(part for part in written(cell, column)[:4] if part)


def plain_rows(table: Table) -> list[list[str]]:
    """All cells as plain text, row by row."""
    return [[plain_cell(row.get(column.key), column) for column in table.columns] for row in table.rows]


def markdown(table: Table) -> str:
    """Write a table with its title, caption, findings and notes as Markdown."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in plain_rows(table)]
    notes = [f"- {said}" for said in (*table.findings, *table.notes)]
    lines = markdown_table([column.heading for column in table.columns], rows, "| --- " * len(table.columns) + "|")
    return "\n".join([f"## {table.title}", "", table.caption, "", *lines, "", *notes, ""])


def latex(table: Table) -> str:
    r"""Write a table that `\input` takes in; its label is `tab:NAME`. It needs the packages `booktabs` and `graphicx`.

    Intervals stand below their means, and a table wider than the text is made smaller.
    """
    words = [all(isinstance(row.get(column.key), str | None) for row in table.rows) for column in table.columns]
    lines = [" & ".join(_latex_cell(row.get(each.key), each) for each in table.columns) + r" \\" for row in table.rows]
    return LATEX % (
        _escaped(" ".join([f"{table.title}.", table.caption, *table.notes])),
        table.name,
        "".join("l" if of_words else "r" for of_words in words),
        " & ".join(_escaped(column.heading) for column in table.columns),
        "\n".join(lines),
    )


def _latex_cell(cell: Cell, column: Column) -> str:
    parts = written(cell, column)
    value, below = (_escaped(" ".join(filter(None, some))) for some in (parts[:2], parts[2:4]))
    return rf"\shortstack[r]{{{value}\\\scriptsize {below}}}" if below else value


def _escaped(text: str) -> str:
    return ANY.sub(lambda special: SPECIAL[special[0]], text)


def numbers(table: Table) -> list[Row]:
    """A table's rows with a column for each number: the mean, its sd, the ends of its interval and what they are."""
    estimated = {key for row in table.rows for key, cell in row.items() if isinstance(cell, Estimate)}
    rows: list[Row] = [{} for _ in table.rows]
    for numbered, cells in zip(rows, table.rows, strict=True):
        for key in (column.key for column in table.columns):
            cell = cells.get(key)
            if key in estimated:
                mean = cell if isinstance(cell, Estimate) else None
                numbered[key] = mean and mean.mean
                numbered |= {f"{key}_{part}": mean and getattr(mean, part) for part in PARTS}
            else:
                numbered[key] = cell
    return rows


def page(name: str, made: ReportContents, provenance: Provenance, images: dict[str, Path], palette: Palette) -> str:
    """Write the page, which needs no network and no other file.

    Args:
        name: of the study.
        made: tables and figures.
        provenance: what the study ran.
        images: figure's name -> its PNG file, embedded where plotly is not installed.
        palette: of the report.
    """
    drawn = {}
    for figure in made.figures:
        if drawing.PLOTLY:
            fragment, width = drawing.fragment(figure, palette)
            drawn[figure.name] = {"fragment": Markup(fragment), "width": width}
        else:
            drawn[figure.name] = {"png": base64.b64encode(images[figure.name].read_bytes()).decode()}
    return rendered(
        "study.html.j2",
        title=f"Study {name}",
        about=provenance.said(),
        made=made,
        drawn=drawn,
        written=written,
        four_digits=four_digits,
        plotly=Markup(drawing.script()) if drawing.PLOTLY and made.figures else None,
        **provenance._asdict(),
    )
