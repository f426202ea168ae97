"""The progress bar of a run."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar

__all__ = ["ProgressBar"]


class ProgressBar(RichProgressBar):
    """Rich's progress bar without metrics: every site's curves do not fit on one line."""

    def __init__(self) -> None:
        super().__init__(leave=False)

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
