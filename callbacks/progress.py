"""The progress of a run: a bar in a terminal, lines in a file, and the last validation figures of a fit."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import RichProgressBar

from aligners.errors import finite
from aligners.fitting.alignment import Alignment
from aligners.fitting.outcomes import few_rows, how_fitted, outcomes
from aligners.progress import Lines, in_terminal
from aligners.reports.finished import make_report
from aligners.reports.publishing import environment, publish
from aligners.similarity.algebra.moments import Moments


class ProgressBar(RichProgressBar):
    """Rich's progress bar without metrics: every site's curves do not fit on one line. Lines where it cannot move."""

    def __init__(self) -> None:
        super().__init__(leave=False)
        self._lines: Lines | None = None
        self._in_file = not in_terminal()
        if self._in_file:
            self.disable()

    @property
    def total_train_batches(self) -> int | float:
        """Batches of this epoch, but not beyond the steps that the module will take."""
        return min(super().total_train_batches, self._steps(self.trainer) - self.trainer.global_step)

    def _steps(self, trainer: pl.Trainer) -> float:
        return getattr(trainer.lightning_module, "training_steps", math.inf)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say in a file that training begins: only now the module knows for how many steps."""
        super().on_train_epoch_start(trainer, pl_module)
        if self._lines is None:
            self._begin("Training", min(self._steps(trainer), trainer.estimated_stepping_batches))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *given: Any) -> None:
        """Say in a file how far it is, with the mean of the losses that were logged last."""
        super().on_train_batch_end(trainer, pl_module, *given)
        if self._lines is not None:
            self._lines.step(lambda: _loss(trainer))

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say in a file that an evaluation begins."""
        super().on_test_start(trainer, pl_module)
        self._begin("Evaluating", math.fsum(trainer.num_test_batches))

    def on_test_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *given: Any) -> None:
        """Say in a file how far it is."""
        super().on_test_batch_end(trainer, pl_module, *given)
        if self._lines is not None:
            self._lines.step()

    def _begin(self, what: str, total: float) -> None:
        begin = self.trainer.global_step if what == "Training" else 0
        shown = self._in_file and self.trainer.is_global_zero
        self._lines = Lines(what, total, begin) if shown else None

    def get_metrics(self, *_: Any) -> dict[str, Any]:
        """None."""
        return {}

    def _get_train_description(self, current_epoch: int) -> str:
        """`Epoch 2 of 6`, or `Training` where the number of epochs is not what ends it."""
        epochs = self.trainer.max_epochs
        text = f"Epoch {current_epoch + 1} of {epochs}" if epochs and epochs > 0 else "Training"
        return text.ljust(len(self.validation_description))


def _loss(trainer: pl.Trainer) -> str:
    """The mean loss over maps, sites and models, as it was last logged; nothing if none was."""
    losses = [value for name, value in trainer.callback_metrics.items() if name.endswith(("/loss", "/train_loss"))]
    return f", loss {torch.stack(losses).nanmean():.3g}" if losses else ""


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
            publish(make_report("fit", meta, list(_rows(pl_module))), self.folder, trainer)


def _rows(module: Alignment) -> Iterator[dict[str, Any]]:
    for fit in module.fits():
        training = outcomes(module.training_record.get(fit.key), len(module.places))
        for s, place in enumerate(module.places):
            model_x, model_y = fit.orient(place.model_x, place.model_y)
            site_x, site_y = fit.orient(place.site_x, place.site_y)
            row = {"model_x": model_x, "model_y": model_y, "method": fit.name, "role": "method"}
            row |= {"site_x": site_x, "site_y": site_y, "fit": how_fitted(fit.aligner), "training": training[s]}
            yield row | {name: finite(module.validation_figures[fit][name][s]) for name in FIGURES}
