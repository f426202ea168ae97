"""The end of a fit: the last validation figures of every aligner as a table and a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import WandbLogger
from rich.table import Table

from aligners.fitting.alignment import Alignment
from aligners.fitting.outcomes import TRAINED_WELL, outcomes, what_did_not_train
from reports.injection.figures import fvu_figure
from reports.names import with_short_names
from reports.showing import TitledTable, screen
from reports.writing import save_figure

__all__ = ["FitSummary"]

FIGURES = ("fvu", "fvu_unseen", "fvu_inverse", "mse", "relative_error", "cosine", "round_trip")

SHOWN = {"fvu": "on the validation texts", "fvu_unseen": "on their rows of types that were left out of fitting"}


class FitSummary(pl.Callback):
    """After a validation that stands on its own, such as the one that closes a fit."""

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show, draw and log the figures of every aligner and site."""
        if trainer.state.fn != "validate" or not isinstance(pl_module, Alignment):
            return
        picture = Path(trainer.log_dir or trainer.default_root_dir) / "fvu.png"  # every rank asks rank 0 for it
        if not trainer.is_global_zero:
            return
        rows = _rows(pl_module)
        shown = with_short_names(rows)
        save_figure(fvu_figure(shown), picture)
        for figure, where in SHOWN.items():
            if any(row[figure] is not None for row in shown):
                screen().print(_table(shown, pl_module.site_names(), figure, where))
        for sentence in what_did_not_train(shown):
            screen().print(sentence, highlight=False)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                columns = list(rows[0])
                logger.log_table("summary", columns=columns, data=[[row[c] for c in columns] for row in rows])
                logger.log_image("fvu", [str(picture)])


def _table(rows: list[dict[str, Any]], sites: list[str], figure: str, where: str) -> Table:
    table = TitledTable(f"FVU {where}, by site pair")
    table.add_column("aligner")
    for site in sites:
        table.add_column(site, justify="right")
    lines: dict[str, list[str]] = {}
    for row in rows:
        lines.setdefault(f"{row['model_x']} → {row['model_y']}  {row['method']}", []).append(
            f"{row[figure]:.3f}" + ("" if row["training"] in (None, TRAINED_WELL) else "*")
        )
    for name, cells in lines.items():
        table.add_row(name, *cells)
    return table


def _rows(module: Alignment) -> list[dict[str, Any]]:
    names = {key: model["name"] for key, model in module.data["models"].items()}
    rows = []
    for fit in module.fits():
        figures = module.validation_figures[fit]
        source, target = fit.orient(names["x"], names["y"])
        training = outcomes(module.training_record.get(fit.key), len(module.sites))
        for s, pair in enumerate(module.sites):
            site_x, site_y = fit.orient(*pair)
            values = {name: float(figures[name][s]) for name in FIGURES}
            rows.append(
                {
                    "model_x": source,
                    "model_y": target,
                    "method": fit.name,
                    "role": "method",
                    "site_x": site_x,
                    "site_y": site_y,
                    "training": training[s],
                    **{name: None if value != value else value for name, value in values.items()},
                }
            )
    return rows
