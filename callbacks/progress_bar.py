"""The progress of a run: a bar in a terminal, lines in a file; and the last validation figures of a fit."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch

from aligners.errors import finite
from aligners.fitting.alignment import Alignment
from aligners.fitting.bank_training import BankTraining
from aligners.fitting.heldout_retrieval import RETRIEVAL_COLUMNS
from aligners.fitting.map_errors import FAR_COLUMNS
from aligners.fitting.training_status import few_rows, how_fitted, outcomes
from aligners.progress import Progress
from aligners.reports.finished_runs import make_report
from aligners.reports.publishing import environment, publish
from aligners.similarity.algebra.moments import Moments


class ProgressBar(pl.callbacks.ProgressBar):
    """Shows how far training has come, over all epochs, or how far an evaluation has; see `Progress`.

    Lightning's own bars have one for each epoch, and none of them writes lines to a file.
    """

    _shown: Progress | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *given: Any
    ) -> None:
        """Begin with the first batch: before it, the module does not know how many steps it trains for."""
        steps = trainer.estimated_stepping_batches
        if isinstance(pl_module, BankTraining):
            steps = min(steps, pl_module.training_steps)
        self._begin("Training", steps, trainer.global_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *given: Any
    ) -> None:
        """Count a step, and add to the line the mean of the losses logged last."""
        if self._shown is not None:
            self._shown.step(lambda: _loss(trainer))

    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *given: Any
    ) -> None:
        """Begin to show an evaluation with its first batch: earlier reading has a bar of its own."""
        batches = math.fsum(trainer.num_test_batches)
        self._begin("Evaluating", batches * (_parts(pl_module) or 1))

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *given: Any
    ) -> None:
        """Count a batch, unless the module counts its parts."""
        if _parts(pl_module) is None:
            self.part_done()

    def part_done(self) -> None:
        """Count one of the `parts` into which the module divides each batch."""
        if self._shown is not None:
            self._shown.step()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the bar away, before anything is printed."""
        self.disable()

    on_test_end = on_train_end

    def on_exception(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        exception: BaseException,
    ) -> None:
        """Restore the terminal."""
        self.disable()

    def disable(self) -> None:
        """Show nothing from now on; Lightning calls this on all ranks but the first."""
        if self._shown is not None:
            self._shown.end()
        self._shown = None

    def _begin(self, what: str, total: float, done: int = 0) -> None:
        if self._shown is None and self.trainer.is_global_zero:
            self._shown = Progress(what, total, done)


def _parts(module: pl.LightningModule) -> int | None:
    """Return how many parts of a test batch the module counts itself; None if it counts none."""
    if isinstance(module, BankTraining):  # it divides its training batches
        return None
    return getattr(module, "parts", None)


def _loss(trainer: pl.Trainer) -> str:
    """Return the mean loss over maps, sites and models, as it was last logged; empty if none was logged."""
    losses = []
    for name, value in trainer.callback_metrics.items():
        if name.endswith(("/loss", "/train_loss")):
            losses.append(value)
    if not losses:
        return ""
    return f", loss {torch.stack(losses).nanmean():.3g}"


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
            publish(
                make_report("fit", meta, list(_rows(pl_module))), self.folder, trainer
            )


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
