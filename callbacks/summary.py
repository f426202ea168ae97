"""The last validation figures of every aligner, at the end of a fit."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl

from aligners.fitting.alignment import Alignment
from aligners.fitting.few_rows import few_rows
from aligners.fitting.outcomes import outcomes
from aligners.reports.kinds import make_report
from aligners.reports.publishing import environment, publish
from aligners.similarity.algebra.moments import Moments

FIGURES = ("fvu", "fvu_unseen", "fvu_inverse", "mse", "relative_error", "cosine", "round_trip")


class FitSummary(pl.Callback):
    """Reports after a validation outside training, such as the last one of a fit.

    Args:
        folder: where the report is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show, draw and log each aligner's figures at each site."""
        if trainer.state.fn == "validate" and isinstance(pl_module, Alignment) and trainer.is_global_zero:
            cautions = few_rows(cast(Moments, pl_module.moments))
            meta = {**pl_module.data, "cautions": cautions, **environment(trainer)}
            publish(make_report("fit", meta, _rows(pl_module)), self.folder, trainer)


def _rows(module: Alignment) -> list[dict[str, Any]]:
    rows = []
    for fit in module.fits():
        training = outcomes(module.training_record.get(fit.key), len(module.places))
        for s, place in enumerate(module.places):
            model_x, model_y = fit.orient(place.model_x, place.model_y)
            site_x, site_y = fit.orient(place.site_x, place.site_y)
            row = {"model_x": model_x, "model_y": model_y, "method": fit.name, "role": "method"}
            row |= {"site_x": site_x, "site_y": site_y, "training": training[s]}
            values = {name: float(module.validation_figures[fit][name][s]) for name in FIGURES}
            rows.append(row | {name: None if isnan(value) else value for name, value in values.items()})
    return rows
