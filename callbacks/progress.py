"""The progress of a run: a bar in a terminal, lines in a file."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import RichProgressBar

from aligners.progress import Lines, in_terminal


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

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """None."""
        return {}

    def _get_train_description(self, current_epoch: int) -> str:
        """`Epoch 2 of 6`, or `Training` where the number of epochs is not what ends it."""
        epochs = self.trainer.max_epochs
        said = f"Epoch {current_epoch + 1} of {epochs}" if epochs and epochs > 0 else "Training"
        return said.ljust(len(self.validation_description))


def _loss(trainer: pl.Trainer) -> str:
    """The mean loss over maps, sites and models, as it was last logged; nothing if none was."""
    losses = [value for name, value in trainer.callback_metrics.items() if name.endswith(("/loss", "/train_loss"))]
    return f", loss {torch.stack(losses).nanmean():.3g}" if losses else ""
