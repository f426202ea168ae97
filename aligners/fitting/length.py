"""How long training takes."""

from __future__ import annotations

import math

import lightning.pytorch as pl

__all__ = ["training_steps"]


def training_steps(trainer: pl.Trainer, rows: int, most: int, read: int) -> int:
    """Steps of the whole run: as the Trainer has it where it has a limit, else as many as `rows` takes.

    Args:
        trainer: of the run, its training batches known.
        rows: how many rows to train on.
        most: the most steps that `rows` may take.
        read: rows of one epoch.
    """
    limited = trainer.estimated_stepping_batches
    if limited != math.inf:
        return int(limited)
    return min(math.ceil(rows * int(trainer.num_training_batches) / read), most)
