"""The report of a fit: the last validation figures of each map at each site."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl

from aligners.errors import finite
from aligners.fitting.alignment import Alignment
from aligners.fitting.heldout_retrieval import RETRIEVAL_COLUMNS
from aligners.fitting.map_errors import FAR_COLUMNS
from aligners.fitting.training_status import few_rows, how_fitted, outcomes
from aligners.reports.finished_runs import make_report
from aligners.reports.publishing import environment, publish
from aligners.similarity.algebra.moments import Moments

FIGURES = (
    *("fvu", "fvu_unseen", *FAR_COLUMNS.values(), "fvu_inverse"),
    *("mse", "relative_error", "cosine", "round_trip", *RETRIEVAL_COLUMNS),
)


class FitSummary(pl.Callback):
    """Reports after a validation outside training, such as the last one of a fit.

    Args:
        folder: where the report is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> None:
        """Show, draw and log each aligner's figures at each site."""
        if trainer.state.fn != "validate" or not isinstance(pl_module, Alignment):
            return
        if trainer.is_global_zero:
            cautions = few_rows(cast(Moments, pl_module.moments))
            meta = {**pl_module.data, "cautions": cautions, **environment(trainer)}
            report = make_report("fit", meta, list(_rows(pl_module)))
            publish(report, self.folder, trainer)


def _rows(module: Alignment) -> Iterator[dict[str, Any]]:
    """A row of the report for each map and site."""
    for fit in module.fits():
        training = outcomes(module.training_record.get(fit.key), len(module.places))
        figures = module.validation_figures[fit]
        for s, place in enumerate(module.places):
            model_x, model_y = fit.orient(place.model_x, place.model_y)
            site_x, site_y = fit.orient(place.site_x, place.site_y)
            row = {
                "model_x": model_x,
                "model_y": model_y,
                "method": fit.name,
                "role": "method",
            }
            row |= {"site_x": site_x, "site_y": site_y}
            row |= {"fit": how_fitted(fit.aligner), "training": training[s]}
            for name in FIGURES:
                row[name] = finite(figures[name][s])
            yield row
