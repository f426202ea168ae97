"""The report of a study: every table and figure that its rows allow, in all formats."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from aligners.errors import UserError
from aligners.files.whole import write_text
from aligners.reports.page.run import save_figure
from aligners.reports.publishing import csv_text
from aligners.reports.report import Row
from aligners.reports.study.drawing import Palette, draw
from aligners.reports.study.frames import Frames
from aligners.reports.study.registry import ReportContents, make
from aligners.reports.study.writing import latex, markdown, numbers, page, plain_rows, provenance
from aligners.reports.tracking import start_run

FOLDER = "report"
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
        ValueError: `report` names what there is not, or nothing was collected.
    """
    if not any(len(frame) for frame in frames.values()):
        raise UserError(f"Expected collected rows of {folder}, but there are none: no cell has finished.")
    contents, place = make(Frames(frames), study.get("report")), folder / FOLDER
    palette, images = Palette(contents.figures), dict[str, Path]()
    for kind in ("tables", "figures"):
        (place / kind).mkdir(parents=True, exist_ok=True)
    for figure in contents.figures:
        images[figure.name] = place / "figures" / f"{figure.name}.png"
        save_figure(draw(figure, palette), images[figure.name])
    about = provenance((folder / "study.yaml").read_text(encoding="utf-8"), results, failures)
    paragraphs = ("\n- ".join([f"## {item.title}\n", *item.findings]) + "\n" for item in contents.findings())
    texts = {
        "report.html": page(study["name"], contents, about, images, palette, first),
        "findings.md": "\n".join(paragraphs),
        "missing.json": json.dumps(contents.missing, indent=1),
        **{f"figures/{figure.name}.csv": csv_text(figure.values) for figure in contents.figures if figure.values},
        **{f"tables/{table.name}.{end}": form(table) for table in contents.tables for end, form in FORMATS.items()},
    }
    for file, text in texts.items():
        write_text(place / file, text)
    _log(place, study["name"], folder.name, contents, images, texts["report.html"])
    return place / "report.html"


def _log(folder: Path, name: str, group: str, made: ReportContents, images: dict[str, Path], page: str) -> None:
    """Log tables, figures and the page as one run in the group of the cells' runs, as WANDB_MODE says."""
    import wandb

    run = start_run(folder, name=f"{name}-report", kind="study report", group=group)
    logged: dict[str, Any] = {f"figures/{figure}": wandb.Image(str(path)) for figure, path in images.items()}
    for table in made.tables:
        headings: list[str | int] = [column.heading for column in table.columns]
        logged[f"tables/{table.name}"] = wandb.Table(columns=headings, data=plain_rows(table))
    logged["report"] = wandb.Html(page, inject=False)
    run.log(logged)
    run.summary["findings"] = [sentence for item in made.findings() for sentence in item.findings]
    run.finish()
