"""Where a report is shown besides its files: on screen, and at W&B where the run has it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import WandbLogger
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

__all__ = ["TitledTable", "log_to_wandb", "say", "say_where", "screen"]


class TitledTable(Table):
    """A table of a report. Its title may be wider than its columns, at which Rich would fold it.

    Args:
        title: over the table, to its left.
    """

    def __init__(self, title: str) -> None:
        super().__init__(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        self._over = title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The title, then the table."""
        yield Text(f"\n{self._over}", style="bold")
        yield from super().__rich_console__(console, options)


def screen() -> Console:
    """The terminal; 120 columns where there is none."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def say(console: Console, line: str, style: str | None = None) -> None:
    """A line of words: folded where there is a terminal, whole in a file or a pipe."""
    console.print(line, style=style, highlight=False, soft_wrap=not console.is_terminal)


def log_to_wandb(
    trainer: pl.Trainer, name: str, meta: dict[str, Any], rows: Sequence[dict[str, Any]], figures: Sequence[Path]
) -> list[Path]:
    """Log a report to every W&B run of a trainer.

    Args:
        trainer: whose loggers are asked.
        name: of the table.
        meta: what holds for all rows; goes to the run's config.
        rows: of equal keys.
        figures: logged under their names without suffix.

    Returns:
        The folders of the runs; none without W&B.
    """
    folders = []
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.config.update(meta, allow_val_change=True)
            columns = list(rows[0])
            logger.log_table(name, columns=columns, data=[[row[column] for column in columns] for row in rows])
            for figure in figures:
                logger.log_image(figure.stem, [str(figure)])
            folders.append(Path(logger.experiment.dir).parent)
    return folders


def say_where(console: Console, folder: Path, wandb: Sequence[Path], what: str = "Report and figures") -> None:
    """The last lines of every report.

    Args:
        console: the terminal.
        folder: of the report.
        wandb: of the W&B runs that have it too.
        what: is in the folder.
    """
    say(console, f"\n{what}: {folder}")
    for run in wandb:
        say(console, f"W&B run: {run}")
