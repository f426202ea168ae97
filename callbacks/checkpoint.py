"""Checkpoints: the state to resume from, and what was fitted."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any, Self

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from aligners.fitting.alignment import Alignment
from aligners.stitching.training import Stitching
from callbacks.interruption import Interruption

__all__ = ["SaveAligners", "SaveStitching"]


class _Save(pl.Callback):
    """Writes `last.ckpt` on Ctrl-C and SIGTERM, and the final file when the run is complete."""

    final: str

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._interruption = Interruption()
        self._complete = False

    def inside(self, folder: Path) -> Self:
        """The same callback, for `folder` unless another was named."""
        other = copy(self)
        other.folder = self.folder or folder
        return other

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From now on, the run is interrupted only where it can be resumed."""
        self._interruption.hold()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Between two steps it can."""
        self._interruption.check(trainer)

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """A validation that is cut off is made again; all ranks have to agree where, and do so between two steps."""
        if trainer.world_size == 1:
            self._interruption.check(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Keep what an interrupted run has reached; after any other error, what was saved before it stays."""
        if isinstance(exception, (KeyboardInterrupt, SIGTERMException)) and not self._complete:
            self._save(trainer, pl_module, "last.ckpt", announce=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the final file."""
        self._save(trainer, pl_module, self.final, announce=True)
        self._complete = True
        self._interruption.release()

    def _has_something(self, trainer: pl.Trainer, module: pl.LightningModule) -> bool:
        """Whether there is anything to lose yet."""
        raise NotImplementedError

    def _save(self, trainer: pl.Trainer, pl_module: pl.LightningModule, name: str, announce: bool = False) -> None:
        if not self._has_something(trainer, pl_module):
            return
        path = (self.folder or Path(trainer.log_dir or trainer.default_root_dir)) / name
        trainer.save_checkpoint(path)
        if announce:
            rank_zero_only(print)(f"Saved {path}")


class SaveAligners(_Save):
    """Writes `last.ckpt` after every `every_n_epochs` and on Ctrl-C, and `aligners.ckpt` when the run is complete.

    Both are Lightning checkpoints that `aligners.storage.load_alignment` reads. `last.ckpt` is to go on from
    (`train.py fit --ckpt_path`); `aligners.ckpt` holds the best parameters of every site. Nothing is written before
    the moments are complete.

    Args:
        folder: where to write; default: beside the run's other files.
        every_n_epochs: how often `last.ckpt` is renewed.
    """

    final = "aligners.ckpt"

    def __init__(self, folder: Path | None = None, every_n_epochs: int = 1) -> None:
        super().__init__(folder)
        if every_n_epochs < 1:
            raise ValueError(f"Expected `every_n_epochs` to be at least 1, but got {every_n_epochs}.")
        self.every_n_epochs = every_n_epochs

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Renew `last.ckpt`."""
        if (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._save(trainer, pl_module, "last.ckpt")

    def _has_something(self, trainer: pl.Trainer, module: pl.LightningModule) -> bool:
        return isinstance(module, Alignment) and module.moments is not None


class SaveStitching(_Save):
    """Writes `last.ckpt` after every validation and on Ctrl-C, and `stitching.ckpt` when the run is complete.

    Both are Lightning checkpoints that `aligners.stitching.storage.load_stitching` reads. `last.ckpt` is to go on from
    (`train.py stitch --ckpt_path`).

    Args:
        folder: where to write; default: beside the run's other files.
    """

    final = "stitching.ckpt"

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Renew `last.ckpt`."""
        if not trainer.sanity_checking:
            self._save(trainer, pl_module, "last.ckpt")

    def _has_something(self, trainer: pl.Trainer, module: pl.LightningModule) -> bool:
        return isinstance(module, Stitching) and trainer.global_step > 0  # and not the evaluation that follows
