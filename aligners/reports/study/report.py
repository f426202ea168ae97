"""The report of a study: every table and figure that its rows allow, in all formats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from aligners.files.whole import whole_file, write_text
from aligners.reports.publishing import csv_text
from aligners.reports.report import Row
from aligners.reports.study.contents import Table
from aligners.reports.study.drawing.colours import Palette
from aligners.reports.study.drawing.static import draw
from aligners.reports.study.estimates import Estimate
from aligners.reports.study.frames import Frames
from aligners.reports.study.provenance import provenance_of
from aligners.reports.study.registry import Made, check_names, make
from aligners.reports.study.tracking import log_report
from aligners.reports.study.writing.html import page
from aligners.reports.study.writing.latex import latex
from aligners.reports.study.writing.markdown import findings_text, markdown

__all__ = ["report"]

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
    name, names = str(_part(spec, "name") or folder.name), _names(_part(spec, "report"))
    check_names(names or [])
    if not any(len(frame) for frame in frames.values()):
        raise ValueError(f"Expected collected rows of {folder}, but there are none: no cell has finished.")
    made = make(Frames(frames), names)
    place = folder / FOLDER
    palette = Palette(made.figures)
    images = _write_figures(place / "figures", made, palette)
    tables = _write_tables(place / "tables", made.tables)
    written = place / "report.html"
    write_text(written, page(name, made, provenance_of(folder, frames), images, palette))
    write_text(place / "findings.md", findings_text(made.findings()))
    write_text(place / "missing.json", json.dumps(made.missing, indent=1))
    log_report(place, name, folder.name, made, images, written)
    return [written, place / "findings.md", place / "missing.json", *tables, *images.values()]


def _names(wanted: Any) -> list[str] | None:
    if wanted is None or wanted == "all" or wanted == ["all"]:
        return None
    return [wanted] if isinstance(wanted, str) else [str(name) for name in wanted]


def _part(spec: Any, name: str) -> Any:
    return spec.get(name) if isinstance(spec, Mapping) else getattr(spec, name, None)


def _write_tables(folder: Path, tables: Iterable[Table]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for table in tables:
        formats = {"md": markdown(table), "tex": latex(table), "csv": csv_text(_numbers(table))}
        for ending, text in formats.items():
            written.append(folder / f"{table.name}.{ending}")
            write_text(written[-1], text)
    return written


def _write_figures(folder: Path, made: Made, palette: Palette) -> dict[str, Path]:
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


def _numbers(table: Table) -> Sequence[Row]:
    """A table's rows with a column for each number: the mean, its sd, the ends of its interval and what they are."""
    rows = []
    for cells in table.rows:
        row: Row = {}
        for column in table.columns:
            cell = cells.get(column.key)
            if any(isinstance(other.get(column.key), Estimate) for other in table.rows):
                found = cell if isinstance(cell, Estimate) else None
                row[column.key] = None if found is None else found.mean
                for part in ("sd", "low", "high", "interval", "pairs", "models", "lost"):
                    row[f"{column.key}_{part}"] = None if found is None else getattr(found, part)
            else:
                row[column.key] = cell
        rows.append(row)
    return rows
