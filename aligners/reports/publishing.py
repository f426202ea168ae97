"""Publishes a report: as files, on screen, and at W&B."""

import json
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import WandbLogger
from rich.console import Console

from aligners.files.atomic import write_text
from aligners.fitting.training_status import MARK
from aligners.reports.escaping import csv_text, in_markdown, markdown_table
from aligners.reports.finished_runs import make_report
from aligners.reports.names import (
    four_digits,
    names_in_full,
    site_name,
    with_short_names,
)
from aligners.reports.page.run_page import save_figure, write_page
from aligners.reports.report import Report, Row
from aligners.reports.screen import SiteTable, say, screen

PACKAGES = ("torch", "lightning", "transformers", "torchmetrics", "numpy")


class WriteReport(pl.Callback):
    """Writes a report, shows it, and logs it to W&B if the run logs there.

    When its test ends, the LightningModule has `rows` and `meta`, and `report_tables` if there are further tables.

    Args:
        kind: the kind of report, from `aligners.reports.finished_runs.KINDS`.
        folder: where it is written.
        options: further arguments of this kind of report.
    """

    def __init__(self, kind: str, folder: Path | str, **options: Any) -> None:
        self.kind = kind
        self.folder = Path(folder)
        self.options = options

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report on rank 0; all ranks hold the same rows."""
        write_report(pl_module, self.kind, self.folder, trainer, **self.options)


def write_report(
    measured: Any, kind: str, folder: Path, trainer: pl.Trainer, **options: Any
) -> None:
    """Write a report, show and log it, on rank 0.

    Args:
        measured: what has the `rows` and `meta`, and `report_tables` if there are further tables.
        kind: as of `WriteReport`.
        folder: likewise.
        trainer: with the loggers.
        options: likewise.
    """
    if not trainer.is_global_zero:
        return
    meta = {**measured.meta, **environment(trainer)}
    tables = getattr(measured, "report_tables", {})
    report = make_report(kind, meta, measured.rows, **tables, **options)
    publish(report, folder, trainer)


def environment(trainer: pl.Trainer) -> Row:
    """Return the versions, device and number of ranks of a run, and the cautions that its data module has by now."""
    found = surroundings(trainer.strategy.root_device)
    found["ranks"] = trainer.world_size
    data = getattr(trainer, "datamodule", None)
    if data is not None:
        found["data_cautions"] = list(data.cautions)
    return found


def surroundings(device: torch.device) -> Row:
    """Return the versions and the device of a process."""
    name = platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    versions = {package: version(package) for package in PACKAGES}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "device": f"{device.type} ({name})",
    }


def publish_alone(measured: Any, kind: str, folder: Path, device: torch.device) -> None:
    """Write and show the report of a command that has no Trainer.

    Args:
        measured: as of `write_report`.
        kind: likewise.
        folder: likewise.
        device: where it was measured.
    """
    meta = {**measured.meta, **surroundings(device)}
    report = make_report(kind, meta, measured.rows, **measured.report_tables)
    write(report, folder)
    write_page(report, folder)
    console = show(report)
    say(console, f"\n{report.files or 'Report'}: {folder}")


def publish(report: Report, folder: Path, trainer: pl.Trainer) -> None:
    """Write a report, show it, and log it to every W&B run of a Trainer.

    Args:
        report: a report of any kind.
        folder: created if it does not exist.
        trainer: the Trainer with the loggers.
    """
    write(report, folder)
    write_page(report, folder)
    console = show(report)
    files = report.files or "Report"
    if report.figures and not report.files:
        files = "Report and figures"
    places = [f"{files}: {folder}"]
    for run in trainer.loggers:
        if isinstance(run, WandbLogger) and not run.experiment.disabled:
            places.append(f"W&B run: {_log(report, folder, run)}")
    if report.findings:
        places.insert(0, "")
    say(console, "\n".join(places))


# ---------------------------------------------------------------------- on screen


def show(report: Report) -> Console:
    """Show a report's tables, note and sentences, and return where."""
    console = screen()
    for table in report.screen:
        console.print(table)
    full = names_in_full(report.rows)
    if "…" in full:  # some are cut
        say(console, full.rstrip(), style="dim")
    if report.note:
        say(console, report.note, style="dim")
    say(console, "\n".join(["", *report.findings]))
    return console


# ---------------------------------------------------------------------- as files


def write(report: Report, folder: Path) -> list[Path]:
    """Write a report's files, each whole or not at all, and return the paths of its figures."""
    content = json.dumps(report.content, indent=1, allow_nan=False)
    write_text(folder / f"{report.name}.json", content)
    for name, table in {report.name: report.rows, **report.tables}.items():
        if table:
            write_text(folder / f"{name}.csv", csv_text(table))
    write_text(folder / f"{report.name}.md", _markdown(report))
    figures = []
    for name, draw in report.figures.items():
        figures.append(folder / f"{name}.png")
        save_figure(draw(), figures[-1])
    return figures


def _markdown(report: Report) -> str:
    """Write the table to four digits or, of kinds without columns, those of the screen; sentences, full names."""
    findings = ""
    for sentence in report.findings:
        if sentence.startswith(MARK):  # no item of a list
            sentence = f"\\{sentence}"
        findings += f"- {in_markdown(sentence)}\n"
    full = in_markdown(names_in_full(report.rows))
    if report.columns:
        if findings:
            findings = f"\n{findings}"
        return _of_rows(report) + findings + full
    title = in_markdown(report.title or report.name)
    parts = [f"# {title}\n", findings, *map(_of_screen, report.screen)]
    return "\n".join(parts) + full


def _of_rows(report: Report) -> str:
    """Return the columns of a report's table; `site_x` stands for both sites, as `1→2` where they differ."""
    lines = []
    for row in with_short_names(report.rows):
        sites = (row["site_x"], row["site_y"])
        if sites[0] != sites[1]:
            row["site_x"] = site_name(sites)
        lines.append([four_digits(row.get(key)) for key in report.columns])
    return _table(list(report.columns.values()), lines)


def _of_screen(table: SiteTable) -> str:
    """Write a table of the screen as Markdown, below its title."""
    headings = [f"{column.group} {column.texts[0]}".strip() for column in table.columns]
    cells = [column.cells for column in table.columns]
    rows = list(zip(*cells, strict=True))
    return f"## {in_markdown(table.title)}\n\n{_table(headings, rows)}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = "|" + "---|" * len(headings)
    return "\n".join(markdown_table(headings, rows, rule)) + "\n"


# ---------------------------------------------------------------------- at W&B


def _log(report: Report, folder: Path, logger: WandbLogger) -> Path:
    """Log a report to a W&B run, and return the run's folder."""
    run = logger.experiment
    run.config.update(report.meta, allow_val_change=True)
    run.summary["findings"] = report.findings
    columns = list(report.rows[0])
    data = [list(row.values()) for row in report.rows]
    logger.log_table(report.name, columns=columns, data=data)
    for name in report.figures:
        logger.log_image(name, [str(folder / f"{name}.png")])
    return Path(run.dir).parent
