"""A study's report at W&B: one run in the group of the cells' runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aligners.reports.study.registry import Made
from aligners.reports.study.writing.cells import plain_rows
from aligners.reports.tracking.runs import start_run

__all__ = ["log_report"]


def log_report(folder: Path, name: str, group: str, made: Made, images: dict[str, Path], page: Path) -> None:
    """Log tables, figures and the page as one run, as WANDB_MODE says.

    Args:
        folder: where W&B keeps its files.
        name: of the study.
        group: of the cells' runs.
        made: tables and figures.
        images: figure's name -> file.
        page: the HTML file.
    """
    import wandb

    run = start_run(folder, name=f"{name}-report", kind="study report", group=group)
    logged: dict[str, Any] = {f"figures/{figure}": wandb.Image(str(path)) for figure, path in images.items()}
    for table in made.tables:
        headings: list[str | int] = [column.heading for column in table.columns]
        logged[f"tables/{table.name}"] = wandb.Table(columns=headings, data=plain_rows(table))
    logged["report"] = wandb.Html(page.read_text(encoding="utf-8"), inject=False)
    run.log(logged)
    run.summary["findings"] = [said for found in made.findings() for said in found.said]
    run.finish()
