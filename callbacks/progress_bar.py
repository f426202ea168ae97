"""The progress of a run: a bar in a terminal, lines in a file; and the last validation figures of a fit."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch

from aligners.errors import finite
from aligners.fitting.alignment import Alignment
from aligners.fitting.heldout_retrieval import RETRIEVAL_COLUMNS
from aligners.fitting.map_errors import FAR_COLUMNS
from aligners.fitting.training_status import few_rows, how_fitted, outcomes
from aligners.progress import Progress
from aligners.reports.finished_runs import make_report
from aligners.reports.publishing import environment, publish
from aligners.similarity.algebra.moments import Moments


class ProgressBar(pl.callbacks.ProgressBar):
    """How far a training is, over all of its epochs, or an evaluation; see `Progress`."""

    _shown: Progress | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *given: Any
    ) -> None:
        """Begin with the first batch: not earlier, the module knows for how many steps it trains."""
        if self._shown is None:
            steps = getattr(pl_module, "training_steps", math.inf)
            self._begin(
                "Training", min(steps, trainer.estimated_stepping_batches), trainer.global_step
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *given: Any
    ) -> None:
        """Count a step, and say in a line the mean of the losses that were logged last."""
        if self._shown is not None:
            self._shown.step(lambda: _loss(trainer))

    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *given: Any
    ) -> None:
        """Begin to show an evaluation with its first batch: what is read before has a bar of its own."""
        if self._shown is None:
            self._begin(
                "Evaluating", math.fsum(trainer.num_test_batches) * getattr(pl_module, "parts", 1)
            )

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *given: Any
    ) -> None:
        """Count a batch, unless its parts are counted."""
        if not hasattr(pl_module, "parts"):
            self.part_done()

    def part_done(self) -> None:
        """Count a part of a batch, which a module with `parts` calls so many times in each."""
        if self._shown is not None:
            self._shown.step()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the bar away, before anything is printed."""
        self.disable()

    on_test_end = on_train_end

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Give the terminal back."""
        self.disable()

    def disable(self) -> None:
        """Show nothing any more; Lightning asks the further ranks for it."""
        if self._shown is not None:
            self._shown.end()
        self._shown = None

    def _begin(self, what: str, total: float, begin: int = 0) -> None:
        if self.trainer.is_global_zero:
            self._shown = Progress(what, total, begin)


def _loss(trainer: pl.Trainer) -> str:
    """The mean loss over maps, sites and models, as it was last logged; nothing if none was."""
    losses = [
        value
        for name, value in trainer.callback_metrics.items()
        if name.endswith(("/loss", "/train_loss"))
    ]
    return f", loss {torch.stack(losses).nanmean():.3g}" if losses else ""


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

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show, draw and log each aligner's figures at each site."""
        if (
            trainer.state.fn == "validate"
            and isinstance(pl_module, Alignment)
            and trainer.is_global_zero
        ):
            meta = {
                **pl_module.data,
                "cautions": few_rows(cast(Moments, pl_module.moments)),
                **environment(trainer),
            }
            publish(make_report("fit", meta, list(_rows(pl_module))), self.folder, trainer)


def _rows(module: Alignment) -> Iterator[dict[str, Any]]:
    for fit in module.fits():
        training = outcomes(module.training_record.get(fit.key), len(module.places))
        for s, place in enumerate(module.places):
            model_x, model_y = fit.orient(place.model_x, place.model_y)
            site_x, site_y = fit.orient(place.site_x, place.site_y)
            row = {"model_x": model_x, "model_y": model_y, "method": fit.name, "role": "method"}
            row |= {
                "site_x": site_x,
                "site_y": site_y,
                "fit": how_fitted(fit.aligner),
                "training": training[s],
            }
            yield row | {name: finite(module.validation_figures[fit][name][s]) for name in FIGURES}
