"""Reports when an evaluation ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from aligners.reports.kinds import make_report
from aligners.reports.publishing import environment, publish

__all__ = ["WriteReport", "write_report"]


class WriteReport(pl.Callback):
    """Writes a report, shows it, and logs it to W&B if the run logs there.

    When its test ends, the LightningModule has `rows` and `meta`, and `report_tables` if there are further tables.

    Args:
        kind: the kind of report, from `aligners.reports.kinds.KINDS`.
        folder: where it is written.
        options: further arguments of this kind of report.
    """

    def __init__(self, kind: str, folder: Path, **options: Any) -> None:
        self.kind, self.folder, self.options = kind, folder, options

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report on rank 0; all ranks hold the same rows."""
        write_report(pl_module, self.kind, self.folder, trainer, **self.options)


def write_report(found: Any, kind: str, folder: Path, trainer: pl.Trainer, **options: Any) -> None:
    """Write a report, show and log it, on rank 0.

    Args:
        found: what was measured: its `rows` and `meta`, and `report_tables` if there are further tables.
        kind: as of `WriteReport`.
        folder: likewise.
        trainer: with the loggers.
        options: likewise.
    """
    if trainer.is_global_zero:
        meta = {**found.meta, **environment(trainer)}
        report = make_report(kind, meta, found.rows, **getattr(found, "report_tables", {}), **options)
        publish(report, folder, trainer)
