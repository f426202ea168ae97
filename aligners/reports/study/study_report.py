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

import pandas as pd

from aligners.errors import UserError
from aligners.files.atomic import write_text
from aligners.files.yaml_tables import table_beside
from aligners.reports.escaping import csv_text, in_markdown, markdown_table
from aligners.reports.names import fixed
from aligners.reports.page.run_page import Cell, models_of, save_figure, versions_of
from aligners.reports.report import Row
from aligners.reports.study import study_figures
from aligners.reports.study.contents import Column, Table
from aligners.reports.study.frames import Frames, counted
from aligners.reports.study.registry import ReportContents, make
from aligners.reports.study.statistics import RANGE_OF_PAIRS, Estimate
from aligners.reports.study.study_figures import Palette
from aligners.reports.templates import lead
from aligners.reports.templates import page as rendered
from aligners.reports.tracking import start_run

FOLDER = "report"
MODEL = ("name", "revision", "fingerprint")
PARTS = (
    "sd",
    "low",
    "high",
    "interval",
    "pairs",
    "models",
    "lost",
)  # of an estimate in a CSV file, beside its mean
LATEX = table_beside(__file__, "latex.yaml")
ANY = re.compile("|".join(map(re.escape, LATEX["special"])))


def provenance(config: str, results: Sequence[Row], failures: Mapping[str, str]) -> Row:
    """What a study ran, for its page: `about` (a sentence), `config`, `cells`, `models`, `versions`, `failures`.

    Args:
        config: the study file.
        results: of the finished cells.
        failures: id of a cell that failed -> what it said.
    """
    times = pd.DataFrame(results, columns=["kind", "seconds"]).groupby("kind", sort=False)[
        "seconds"
    ]
    cells = [
        {"kind": kind, "cells": len(seconds), "hours": seconds.sum() / 3600}
        for kind, seconds in times
    ]
    hours, failed = (
        sum(row["hours"] for row in cells),
        f", {len(failures)} of them failed" if failures else "",
    )
    time = f"{hours:.1f} hours" if hours >= 1 else counted(round(60 * hours), "minute")
    metas = [{"versions": result["versions"], **result["meta"]} for result in results]
    models = {
        (model.get("name"), model.get("fingerprint")): model
        for meta in metas
        for model in models_of(meta)
    }
    named = [{key: str(model.get(key) or "") for key in MODEL} for model in models.values()]
    versions = Counter(", ".join(versions_of(meta)) for meta in metas).items()
    return {
        "about": f"{counted(len(results) + len(failures), 'cell')}{failed}, {time} of computing in all.",
        "config": config,
        "cells": cells,
        "models": sorted(named, key=itemgetter("name")),
        "versions": [
            f"{version} ({counted(count, 'cell')})" for version, count in versions if version
        ],
        "failures": dict(sorted(failures.items())),
    }


def written(cell: Any, column: Column) -> Cell:
    """Write a cell as its column says."""

    def number(value: float) -> str:
        return fixed(value if column.form == "d" else column.scale * value, column.form)

    if cell is None or isinstance(cell, str):
        return Cell(cell or "", key=cell or "")
    cell, interval = cell if isinstance(cell, Estimate) else Estimate(cell), ""
    if cell.low is not None and cell.high is not None:
        left, right = "{}" if cell.interval == RANGE_OF_PAIRS else "[]"
        interval = f"{left}{number(cell.low)}, {number(cell.high)}{right}"
    sd = "" if cell.sd is None else f"± {number(cell.sd)}"
    lost = f"({cell.lost} of {cell.pairs + cell.lost} pairs lost)" if cell.lost else ""
    return Cell(number(cell.mean), sd, interval, lost, float(cell.mean))


def plain_cell(cell: Any, column: Column) -> str:
    """A cell as plain text in one piece."""
    return " ".join(part for part in written(cell, column)[:4] if part)


def plain_rows(table: Table) -> list[list[str]]:
    """All cells as plain text, row by row."""
    return [
        [plain_cell(row.get(column.key), column) for column in table.columns] for row in table.rows
    ]


def markdown(table: Table) -> str:
    """Write a table with its title, caption, findings and notes as Markdown."""
    notes = [f"- {in_markdown(note)}" for note in (*table.findings, *table.notes)]
    headings, rule = (
        [column.heading for column in table.columns],
        "| --- " * len(table.columns) + "|",
    )
    lines = markdown_table(headings, plain_rows(table), rule)
    return "\n".join(
        [
            f"## {in_markdown(table.title)}",
            "",
            in_markdown(table.caption),
            "",
            *lines,
            "",
            *notes,
            "",
        ]
    )


def latex(table: Table) -> str:
    r"""Write a table that `\input` takes in; its label is `tab:NAME`. It needs the packages `booktabs` and `graphicx`.

    Intervals stand below their means, and a table wider than the text is made smaller.
    """
    words = [
        all(isinstance(row.get(column.key), str | None) for row in table.rows)
        for column in table.columns
    ]
    cells = [
        [_latex_cell(row.get(column.key), column) for column in table.columns] for row in table.rows
    ]
    frame = pd.DataFrame(cells, columns=[_escaped(column.heading) for column in table.columns])
    form = "".join("l" if of_words else "r" for of_words in words)
    tabular = frame.to_latex(index=False, escape=False, column_format=form).strip()
    return LATEX["table"] % (
        _escaped(" ".join([f"{table.title}.", table.caption, *table.notes])),
        table.name,
        tabular,
    )


def _latex_cell(cell: Any, column: Column) -> str:
    parts = written(cell, column)
    value, below = (_escaped(" ".join(filter(None, some))) for some in (parts[:2], parts[2:4]))
    return rf"\shortstack[r]{{{value}\\\scriptsize {below}}}" if below else value


def _escaped(text: str) -> str:
    return ANY.sub(lambda special: LATEX["special"][special[0]], text)


def numbers(table: Table) -> list[Row]:
    """A table's rows with a column for each number: the mean, its sd, the ends of its interval and what they are."""
    estimated = {
        key for row in table.rows for key, cell in row.items() if isinstance(cell, Estimate)
    }
    rows = []
    for cells in table.rows:
        row: Row = {}
        for key in (column.key for column in table.columns):
            cell = cells.get(key)
            row[key] = (
                cell.mean if isinstance(cell, Estimate) else None if key in estimated else cell
            )
            if key in estimated:
                row |= {f"{key}_{part}": getattr(cell, part, None) for part in PARTS}
        rows.append(row)
    return rows


def page(
    name: str,
    made: ReportContents,
    about: Row,
    images: dict[str, Path],
    palette: Palette,
    first: str | None = None,
) -> str:
    """Write the page, which needs no network and no other file.

    Args:
        name: of the study.
        made: tables and figures.
        about: what the study ran, see `provenance`.
        images: figure's name -> its PNG file, embedded where plotly is not installed.
        palette: of the report.
        first: what it says first; default: what was found.
    """
    if study_figures.PLOTLY:
        drawn = {figure.name: study_figures.fragment(figure, palette) for figure in made.figures}
    else:
        drawn = {
            name: {"png": base64.b64encode(path.read_bytes()).decode()}
            for name, path in images.items()
        }
    script = study_figures.script() if study_figures.PLOTLY and made.figures else None
    shown = {"made": made, "drawn": drawn, "written": written, "plotly": script}
    words = first or lead("study", made=made, **about)
    return rendered("study.html.j2", title=f"Study {name}", lead=words, **shown, **about)


# ---------------------------------------------------------------------- the files

FORMATS = {"md": markdown, "tex": latex, "csv": lambda table: csv_text(numbers(table))}  # of tables


def report(
    folder: Path,
    frames: Mapping[str, pd.DataFrame],
    study: Row,
    results: Sequence[Row],
    failures: Mapping[str, str],
    first: str | None = None,
) -> Path:
    """Write a study's report under `folder/report/`, and log it to W&B as one run of the study's group.

    Tables are written as LaTeX, Markdown and CSV under `tables/`, figures as PNG and CSV under `figures/`, and
    everything as `report.html`, `findings.md` and `missing.json` (name -> why it could not be made).

    Args:
        folder: of the study.
        frames: kind -> the collected rows.
        study: its `name`, and `report`, names of tables and figures out of `aligners.reports.study.registry.CONTENTS`;
            None for all that can be made.
        results: of the finished cells.
        failures: id of a cell that failed -> what it said.
        first: what the page says first; default: what was found.

    Returns:
        The page.

    Raises:
        ValueError: nothing was collected.
    """
    if not any(len(frame) for frame in frames.values()):
        raise UserError(
            f"Expected collected rows of {folder}, but there are none: no cell has finished."
        )
    contents, place = make(Frames(frames), study.get("report")), folder / FOLDER
    palette, images = Palette(contents.figures), dict[str, Path]()
    for figure in contents.figures:
        images[figure.name] = place / "figures" / f"{figure.name}.png"
        save_figure(study_figures.draw(figure, palette), images[figure.name])
    about = provenance((folder / "study.yaml").read_text(encoding="utf-8"), results, failures)
    paragraphs = (
        "\n- ".join([f"## {item.title}\n", *item.findings]) + "\n" for item in contents.findings()
    )
    texts = {
        "report.html": page(study["name"], contents, about, images, palette, first),
        "findings.md": in_markdown("\n".join(paragraphs)),
        "missing.json": json.dumps(contents.missing, indent=1),
        **{
            f"figures/{figure.name}.csv": csv_text(figure.values)
            for figure in contents.figures
            if figure.values
        },
        **{
            f"tables/{table.name}.{end}": form(table)
            for table in contents.tables
            for end, form in FORMATS.items()
        },
    }
    for file, text in texts.items():
        write_text(place / file, text)
    _log(place, study["name"], folder.name, contents, images, texts["report.html"])
    return place / "report.html"


def _log(
    folder: Path, name: str, group: str, made: ReportContents, images: dict[str, Path], page: str
) -> None:
    """Log tables, figures and the page as one run in the group of the cells' runs, as WANDB_MODE says."""
    import wandb

    run = start_run(folder, name=f"{name}-report", kind="study report", group=group)
    logged: dict[str, Any] = {
        f"figures/{figure}": wandb.Image(str(path)) for figure, path in images.items()
    }
    for table in made.tables:
        headings: list[str | int] = [column.heading for column in table.columns]
        logged[f"tables/{table.name}"] = wandb.Table(columns=headings, data=plain_rows(table))
    logged["report"] = wandb.Html(page, inject=False)
    run.log(logged)
    run.summary["findings"] = [sentence for item in made.findings() for sentence in item.findings]
    run.finish()
