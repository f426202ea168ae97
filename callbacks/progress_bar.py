"""The progress of a run: a bar in a terminal, lines in a file."""

import math
from typing import Any

import lightning.pytorch as pl
import torch

from aligners.fitting.bank_training import BankTraining
from aligners.progress import Progress


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
