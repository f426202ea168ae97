"""The report of a study: every table and figure that its rows allow, in all formats.

Those are one HTML page, LaTeX, Markdown, CSV, and what W&B gets.
"""

import base64
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from pandas import DataFrame

from aligners.errors import UserError
from aligners.files.atomic import write_text
from aligners.files.yaml_tables import table_beside
from aligners.reports.escaping import csv_text, in_markdown, markdown_table
from aligners.reports.names import counted, fixed
from aligners.reports.page.run_page import Cell, models_of, save_figure, versions_of
from aligners.reports.report import Row
from aligners.reports.study import study_figures
from aligners.reports.study.contents import Column, Table
from aligners.reports.study.frames import Frames
from aligners.reports.study.registry import ReportContents, make
from aligners.reports.study.statistics import RANGE_OF_PAIRS, Estimate
from aligners.reports.templates import page as rendered
from aligners.reports.tracking import start_run

FOLDER = "report"
MODEL = ("name", "revision", "fingerprint")
# of an estimate in a CSV file, beside its mean
PARTS = ("sd", "low", "high", "interval", "pairs", "models", "lost")
LATEX = table_beside(__file__, "latex.yaml")
SPECIAL = re.compile("|".join(map(re.escape, LATEX["special"])))


def report(
    folder: Path,
    frames: Mapping[str, DataFrame],
    study: Row,
    results: Sequence[Row],
    failures: Mapping[str, str],
    first: str | None = None,
) -> Path:
    """Write a study's report under `folder/report/`, and log it to W&B as one run of the study's group.

    Tables are written as LaTeX, Markdown and CSV under `tables/`, figures as PNG and CSV under `figures/`, and
    everything as `report.html`, `findings.md` and `missing.json` (name -> why it could not be made).

    Args:
        folder: folder of the study.
        frames: kind -> the collected rows.
        study: its `name`, and `report`, names of tables and figures out of `aligners.reports.study.registry.CONTENTS`;
            None for all that can be made.
        results: results of the finished cells.
        failures: id of a cell that failed -> what it said.
        first: what the page says first; default: what was found.

    Returns:
        The page.

    Raises:
        ValueError: nothing was collected.
    """
    if not any(map(len, frames.values())):
        raise UserError(
            f"Expected collected rows of {folder}, but there are none: no cell has finished."
        )
    made = make(Frames(frames), study.get("report"))
    place = folder / FOLDER
    images = _write_figures(made, place / "figures")
    for table in made.tables:
        write_text(place / "tables" / f"{table.name}.md", markdown(table))
        write_text(place / "tables" / f"{table.name}.tex", latex(table))
        write_text(place / "tables" / f"{table.name}.csv", csv_text(numbers(table)))
    write_text(place / "findings.md", findings(made))
    write_text(place / "missing.json", json.dumps(made.missing, indent=1))
    about = provenance(
        (folder / "study.yaml").read_text(encoding="utf-8"), results, failures
    )
    text = page(study["name"], made, about, images, first)
    write_text(place / "report.html", text)
    _log(place, study["name"], folder.name, made, images, text)
    return place / "report.html"


def _write_figures(made: ReportContents, place: Path) -> dict[str, Path]:
    """Write each figure and its values; return the figure's name -> its image."""
    palette = study_figures.Palette(made.figures)
    images = {}
    for figure in made.figures:
        images[figure.name] = place / f"{figure.name}.png"
        save_figure(study_figures.draw(figure, palette), images[figure.name])
        if figure.values:
            write_text(place / f"{figure.name}.csv", csv_text(figure.values))
    return images


# ---------------------------------------------------------------------- the page


def page(
    name: str,
    made: ReportContents,
    about: Row,
    images: Mapping[str, Path],
    first: str | None = None,
) -> str:
    """Write the page, which needs no network and no other file.

    Args:
        name: name of the study.
        made: tables and figures.
        about: what the study ran, see `provenance`.
        images: figure's name -> its PNG file.
        first: what it says first; default: what was found.
    """
    encoded = {}
    for figure, path in images.items():
        encoded[figure] = base64.b64encode(path.read_bytes()).decode()
    words = first or lead(made, about)
    shown = {"made": made, "images": encoded, "written": written, **about}
    return rendered("study.html.j2", title=f"Study {name}", lead=words, **shown)


def lead(made: ReportContents, about: Row) -> str:
    """Say what was compared and made, with the first sentences of two tables or figures that have findings.

    Args:
        made: tables and figures.
        about: what the study ran, see `provenance`.
    """
    models = counted(len(about["models"]), "model")
    cells = counted(sum(row["cells"] for row in about["cells"]), "cell")
    tables, figures = (
        counted(len(made.tables), "table"),
        counted(len(made.figures), "figure"),
    )
    said = f"This study compared {models} in {cells} of work, from which {tables} and {figures} are made."
    found = made.findings()[:2]
    if not found:
        return f"{said} None of them comes with a finding in words: see the first figure and the tables."
    return " ".join([said, *(item.findings[0] for item in found)])


def provenance(config: str, results: Sequence[Row], failures: Mapping[str, str]) -> Row:
    """Describe a study's run for its page: `about` (a sentence), `config`, `cells`, `models`, `versions`, `failures`.

    Args:
        config: the study file.
        results: results of the finished cells.
        failures: id of a cell that failed -> what it said.
    """
    cells: dict[str, Row] = {}
    models, versions = dict[Any, Row](), Counter[str]()
    for result in results:
        kind = result["kind"]
        cell = cells.setdefault(kind, {"kind": kind, "cells": 0, "hours": 0.0})
        cell["cells"] += 1
        cell["hours"] += result["seconds"] / 3600
        meta = {"versions": result["versions"], **result["meta"]}
        versions[", ".join(versions_of(meta))] += 1
        for model in models_of(meta):
            known = {key: str(model.get(key) or "") for key in MODEL}
            models[known["name"], known["fingerprint"]] = known
    del versions[""]
    return {
        "about": _about(list(cells.values()), len(failures)),
        "config": config,
        "cells": list(cells.values()),
        "models": sorted(models.values(), key=itemgetter("name")),
        "versions": [f"{said} ({counted(n, 'cell')})" for said, n in versions.items()],
        "failures": dict(sorted(failures.items())),
    }


def _about(cells: Sequence[Row], failed: int) -> str:
    """Say how many cells there were, how many of them failed, and how long the others took."""
    count, hours = failed, 0.0
    for cell in cells:
        count += cell["cells"]
        hours += cell["hours"]
    said = counted(count, "cell")
    if failed:
        said += f", {failed} of them failed"
    time = f"{hours:.1f} hours"
    if hours < 1:
        time = counted(round(60 * hours), "minute")
    return f"{said}, {time} of computing in all."


def findings(made: ReportContents) -> str:
    """Write what was found as Markdown, below the titles of the tables and figures that say it."""
    sections = []
    for item in made.findings():
        lines = [f"## {item.title}\n", *item.findings]
        sections.append("\n- ".join(lines) + "\n")
    return in_markdown("\n".join(sections))


# ---------------------------------------------------------------------- cells and tables


def written(cell: Any, column: Column) -> Cell:
    """Write a cell as its column says."""
    if cell is None or isinstance(cell, str):
        return Cell(cell or "", key=cell or "")
    estimate = cell
    if not isinstance(cell, Estimate):
        estimate = Estimate(cell)

    def number(value: float) -> str:
        if column.form == "d":
            return fixed(value, "d")
        return fixed(column.scale * value, column.form)

    sd = interval = lost = ""
    if estimate.sd is not None:
        sd = f"± {number(estimate.sd)}"
    if estimate.low is not None and estimate.high is not None:
        ends = f"{number(estimate.low)}, {number(estimate.high)}"
        interval = f"[{ends}]"
        if estimate.interval == RANGE_OF_PAIRS:
            interval = f"{{{ends}}}"
    if estimate.lost:
        lost = f"({estimate.lost} of {estimate.pairs + estimate.lost} pairs lost)"
    return Cell(number(estimate.mean), sd, interval, lost, float(estimate.mean))


def plain_cell(cell: Any, column: Column) -> str:
    """Return a cell as plain text in one piece."""
    return " ".join(filter(None, written(cell, column)[:4]))


def plain_rows(table: Table) -> list[list[str]]:
    """Return all cells as plain text, row by row."""
    rows = []
    for row in table.rows:
        rows.append(
            [plain_cell(row.get(column.key), column) for column in table.columns]
        )
    return rows


def markdown(table: Table) -> str:
    """Write a table with its title, caption, findings and notes as Markdown."""
    headings = [column.heading for column in table.columns]
    rule = "| --- " * len(headings) + "|"
    lines = [f"## {in_markdown(table.title)}", "", in_markdown(table.caption), ""]
    lines += [*markdown_table(headings, plain_rows(table), rule), ""]
    for note in (*table.findings, *table.notes):
        lines.append(f"- {in_markdown(note)}")
    return "\n".join([*lines, ""])


def latex(table: Table) -> str:
    r"""Write a table that `\input` takes in; its label is `tab:NAME`. It needs the packages `booktabs` and `graphicx`.

    Intervals stand below their means, and a table wider than the text is made smaller.
    """
    form, columns = "", {}
    for column in table.columns:
        cells = [row.get(column.key) for row in table.rows]
        if {type(cell) for cell in cells} <= {str, type(None)}:
            form += "l"
        else:
            form += "r"
        columns[column.key] = [_latex_cell(cell, column) for cell in cells]
    headings = [_escaped(column.heading) for column in table.columns]
    frame = DataFrame(columns)
    tabular = frame.to_latex(
        index=False, escape=False, column_format=form, header=headings
    )
    caption = _escaped(" ".join([f"{table.title}.", table.caption, *table.notes]))
    return str(LATEX["table"] % (caption, table.name, tabular.strip()))


def _latex_cell(cell: Any, column: Column) -> str:
    value, sd, interval, lost, *_ = written(cell, column)
    above = _escaped(f"{value} {sd}".strip())
    below = _escaped(f"{interval} {lost}".strip())
    if not below:
        return above
    return rf"\shortstack[r]{{{above}\\\scriptsize {below}}}"


def _escaped(text: str) -> str:
    return SPECIAL.sub(lambda special: LATEX["special"][special[0]], text)


def numbers(table: Table) -> list[Row]:
    """Return a table's rows with a column for each number: the mean, its sd, its interval and what that covers."""
    rows: list[Row] = [{} for _ in table.rows]
    for column in table.columns:
        key = column.key
        cells = [row.get(key) for row in table.rows]
        estimated = any(isinstance(cell, Estimate) for cell in cells)
        for row, cell in zip(rows, cells, strict=True):
            if not estimated:
                row[key] = cell
                continue
            row[key] = getattr(cell, "mean", None)
            for part in PARTS:
                row[f"{key}_{part}"] = getattr(cell, part, None)
    return rows


# ---------------------------------------------------------------------- W&B


def _log(
    folder: Path,
    name: str,
    group: str,
    made: ReportContents,
    images: Mapping[str, Path],
    page: str,
) -> None:
    """Log tables, figures and the page as one run in the group of the cells' runs, as WANDB_MODE says."""
    import wandb

    logged: dict[str, Any] = {"report": wandb.Html(page, inject=False)}
    for figure, path in images.items():
        logged[f"figures/{figure}"] = wandb.Image(str(path))
    for table in made.tables:
        headings: list[str | int] = [column.heading for column in table.columns]
        logged[f"tables/{table.name}"] = wandb.Table(
            columns=headings, data=plain_rows(table)
        )
    sentences = list[str]()
    for item in made.findings():
        sentences += item.findings
    run = start_run(folder, name=f"{name}-report", kind="study report", group=group)
    run.log(logged)
    run.summary["findings"] = sentences
    run.finish()
