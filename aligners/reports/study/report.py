"""The report of a study: every table and figure that its rows allow, in all formats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from aligners.errors import UserError
from aligners.files.whole import whole_file, write_text
from aligners.reports.publishing import csv_text
from aligners.reports.study.contents import Table
from aligners.reports.study.drawing import Palette, draw
from aligners.reports.study.frames import Frames
from aligners.reports.study.registry import ReportContents, check_names, make
from aligners.reports.study.writing import latex, markdown, numbers, page, plain_rows, provenance
from aligners.reports.tracking import start_run

FOLDER = "report"


def report(folder: Path, frames: Mapping[str, pd.DataFrame], spec: Any) -> list[Path]:
    """Write a study's report under `folder/report/`, and log it to W&B as one run of the study's group.

    Tables are written as LaTeX, Markdown and CSV under `tables/`, figures as PNG and CSV under `figures/`, and
    everything as `report.html`, `findings.md` and `missing.json` (name -> why it could not be made).

    Args:
        folder: of the study.
        frames: kind -> the collected rows.
        spec: the study: `name`, and `report`, names of tables and figures out of
            `aligners.reports.study.registry.CONTENTS`;
            null or "all" for all that can be made. A mapping, or an object with these attributes.

    Returns:
        The files, the page first.

    Raises:
        ValueError: `report` names what there is not, or nothing was collected.
    """
    spec = spec if isinstance(spec, Mapping) else vars(spec)
    name, wanted = str(spec.get("name") or folder.name), spec.get("report")
    wanted = [wanted] if isinstance(wanted, str) else wanted
    names = None if wanted is None or list(wanted) == ["all"] else [str(each) for each in wanted]
    check_names(names or [])
    if not any(len(frame) for frame in frames.values()):
        raise UserError(f"Expected collected rows of {folder}, but there are none: no cell has finished.")
    made, place = make(Frames(frames), names), folder / FOLDER
    palette = Palette(made.figures)
    images = _write_figures(place / "figures", made, palette)
    findings = (
        f"## {found.title}\n\n" + "".join(f"- {said}\n" for said in found.findings) for found in made.findings()
    )
    texts = {
        "report.html": page(name, made, provenance(folder), images, palette),
        "findings.md": "\n".join(findings),
        "missing.json": json.dumps(made.missing, indent=1),
    }
    for file, text in texts.items():
        write_text(place / file, text)
    tables = _write_tables(place / "tables", made.tables)
    _log(place, name, folder.name, made, images, texts["report.html"])
    return [*(place / file for file in texts), *tables, *images.values()]


def _write_tables(folder: Path, tables: Iterable[Table]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for table in tables:
        formats = {"md": markdown(table), "tex": latex(table), "csv": csv_text(numbers(table))}
        for ending, text in formats.items():
            written.append(folder / f"{table.name}.{ending}")
            write_text(written[-1], text)
    return written


def _write_figures(folder: Path, made: ReportContents, palette: Palette) -> dict[str, Path]:
    """Write every figure and its values; figure's name -> its image."""
    folder.mkdir(parents=True, exist_ok=True)
    images = {}
    for figure in made.figures:
        images[figure.name] = folder / f"{figure.name}.png"
        with whole_file(images[figure.name]) as unfinished:
            draw(figure, palette).savefig(unfinished, dpi=130, format="png")
        if figure.values:
            write_text(folder / f"{figure.name}.csv", csv_text(figure.values))
    return images


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
    run.summary["findings"] = [said for found in made.findings() for said in found.findings]
    run.finish()
