"""Checkpoints: the state to resume from, and the fitted aligners."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only

from aligners.fitting.alignment import Alignment
from aligners.stitching.training import Stitching

__all__ = ["SaveAligners", "SaveStitching"]


class SaveAligners(pl.Callback):
    """Writes `last.ckpt` after every `every_n_epochs` and on Ctrl-C, and `aligners.ckpt` when the run is complete.

    Both are Lightning checkpoints with what `aligners.storage.load_alignment` reads. `last.ckpt` is to go on
    from (`train.py fit --ckpt_path`); `aligners.ckpt` holds the best parameters of every site. Nothing is
    written before the moments are complete: there is nothing to lose yet.

    Args:
        folder: where; default: beside the run's other files.
        every_n_epochs: how often `last.ckpt` is renewed.
    """

    def __init__(self, folder: Path | None = None, every_n_epochs: int = 1) -> None:
        if every_n_epochs < 1:
            raise ValueError(f"Expected `every_n_epochs` to be at least 1, but got {every_n_epochs}.")
        self.folder, self.every_n_epochs = folder, every_n_epochs

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Renew `last.ckpt`."""
        if (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._save(trainer, pl_module, "last.ckpt")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Keep what an interrupted run has reached; after any other error, what was saved before it stays."""
        if isinstance(exception, KeyboardInterrupt):
            self._save(trainer, pl_module, "last.ckpt", announce=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the fitted aligners."""
        self._save(trainer, pl_module, "aligners.ckpt", announce=True)

    def _save(self, trainer: pl.Trainer, pl_module: pl.LightningModule, name: str, announce: bool = False) -> None:
        if not isinstance(pl_module, Alignment) or pl_module.moments is None:
            return
        _write(trainer, self.folder, name, announce)


class SaveStitching(pl.Callback):
    """Writes `last.ckpt` after every validation and on Ctrl-C, and `stitching.ckpt` when the run is complete.

    Both are Lightning checkpoints with what `aligners.stitching.storage.load_stitching` reads. `last.ckpt` is to go on
    from (`train.py stitch --ckpt_path`).

    Args:
        folder: where; default: beside the run's other files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Renew `last.ckpt`."""
        if not trainer.sanity_checking:
            self._save(trainer, pl_module, "last.ckpt")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Keep what an interrupted run has reached; after any other error, what was saved before it stays."""
        if isinstance(exception, KeyboardInterrupt) and trainer.global_step > 0:
            self._save(trainer, pl_module, "last.ckpt", announce=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the trained layers."""
        self._save(trainer, pl_module, "stitching.ckpt", announce=True)

    def _save(self, trainer: pl.Trainer, pl_module: pl.LightningModule, name: str, announce: bool = False) -> None:
        if isinstance(pl_module, Stitching):  # and not the evaluation that follows
            _write(trainer, self.folder, name, announce)


def _write(trainer: pl.Trainer, folder: Path | None, name: str, announce: bool) -> None:
    path = (folder or Path(trainer.log_dir or trainer.default_root_dir)) / name
    trainer.save_checkpoint(path)
    if announce:
        rank_zero_only(print)(f"Saved {path}")
