"""Publishes a report: as files, on screen, and at W&B."""

import json
import platform
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
from aligners.reports.names import four_digits, names_in_full, site_name, with_short_names
from aligners.reports.page.run_page import save_figure, write_page
from aligners.reports.report import Report, Row
from aligners.reports.screen import SiteTable, say, screen

PACKAGES = ("torch", "lightning", "transformers", "torchmetrics", "numpy")


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
    runs = [
        run
        for run in trainer.loggers
        if isinstance(run, WandbLogger) and not run.experiment.disabled
    ]
    files = report.files or ("Report and figures" if report.figures else "Report")
    places = [f"{files}: {folder}", *(f"W&B run: {_log(report, folder, run)}" for run in runs)]
    say(console, "\n".join(["", *places] if report.findings else places))


def show(report: Report) -> Console:
    """Show a report's tables, note and sentences, and return where."""
    console = screen()
    for table in report.screen:
        console.print(table)
    if "…" in (full := names_in_full(report.rows)):  # some are cut
        say(console, full.rstrip(), style="dim")
    if report.note:
        say(console, report.note, style="dim")
    say(console, "\n".join(["", *report.findings]))
    return console


def write(report: Report, folder: Path) -> list[Path]:
    """Write a report's files, each whole or not at all, and return the paths of its figures."""
    write_text(
        folder / f"{report.name}.json", json.dumps(report.content, indent=1, allow_nan=False)
    )
    for name, table in {report.name: report.rows, **report.tables}.items():
        if table:
            write_text(folder / f"{name}.csv", csv_text(table))
    write_text(folder / f"{report.name}.md", _markdown(report))
    for name, draw in report.figures.items():
        save_figure(draw(), folder / f"{name}.png")
    return [folder / f"{name}.png" for name in report.figures]


def environment(trainer: pl.Trainer) -> Row:
    """Return the versions, device and number of ranks of a run, and the cautions that its data module has by now."""
    data = getattr(trainer, "datamodule", None)
    cautions = {} if data is None else {"data_cautions": list(data.cautions)}
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in PACKAGES},
        },
        "device": f"{device.type} ({name})",
        "ranks": trainer.world_size,
        **cautions,
    }


def _log(report: Report, folder: Path, logger: WandbLogger) -> Path:
    """Log a report to a W&B run, and return the run's folder."""
    logger.experiment.config.update(report.meta, allow_val_change=True)
    logger.experiment.summary["findings"] = report.findings
    columns = list(report.rows[0])
    logger.log_table(
        report.name,
        columns=columns,
        data=[[row[column] for column in columns] for row in report.rows],
    )
    for name in report.figures:
        logger.log_image(name, [str(folder / f"{name}.png")])
    return Path(logger.experiment.dir).parent


def _markdown(report: Report) -> str:
    """Write the table to four digits or, of kinds without columns, those of the screen; sentences, full names."""
    plain = (
        sentence.replace(MARK, f"\\{MARK}", sentence.startswith(MARK))
        for sentence in report.findings
    )
    findings = "".join(f"- {in_markdown(sentence)}\n" for sentence in plain)
    full = in_markdown(names_in_full(report.rows))
    if not report.columns:
        tables = "".join(f"\n{_of_screen(table)}" for table in report.screen)
        return f"# {in_markdown(report.title or report.name)}\n\n{findings}{tables}{full}"
    shown = map(_one_site, with_short_names(report.rows))
    rows = [[four_digits(row.get(key)) for key in report.columns] for row in shown]
    lines = markdown_table(report.columns.values(), rows, "|" + "---|" * len(report.columns))
    return "\n".join(lines) + "\n" + (f"\n{findings}" if findings else "") + full


def _of_screen(table: SiteTable) -> str:
    """A table of the screen as Markdown, below its title."""
    headings = [" ".join(filter(None, (column.group, column.texts[0]))) for column in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    lines = markdown_table(headings, list(rows), "|" + "---|" * len(headings))
    return "\n".join([f"## {in_markdown(table.title)}", "", *lines]) + "\n"


def _one_site(row: Row) -> Row:
    """A row whose `site_x` stands for both sites: `1→2` where they differ."""
    return (
        row
        if row["site_x"] == row["site_y"]
        else row | {"site_x": site_name((row["site_x"], row["site_y"]))}
    )


class WriteReport(pl.Callback):
    """Writes a report, shows it, and logs it to W&B if the run logs there.

    When its test ends, the LightningModule has `rows` and `meta`, and `report_tables` if there are further tables.

    Args:
        kind: the kind of report, from `aligners.reports.finished_runs.KINDS`.
        folder: where it is written.
        options: further arguments of this kind of report.
    """

    def __init__(self, kind: str, folder: Path | str, **options: Any) -> None:
        self.kind, self.folder, self.options = kind, Path(folder), options

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
    if trainer.is_global_zero:
        meta = {**measured.meta, **environment(trainer)}
        tables = getattr(measured, "report_tables", {})
        publish(make_report(kind, meta, measured.rows, **tables, **options), folder, trainer)
