"""How long training takes."""

from __future__ import annotations

import math

import lightning.pytorch as pl


def training_steps(trainer: pl.Trainer, rows: int, most: int, read: int) -> int:
    """Return the number of steps of the whole run: the Trainer's limit if it has one, otherwise what `rows` takes.

    Args:
        trainer: the run's Trainer, after its training loader was set up.
        rows: number of rows to train on.
        most: upper limit on the steps that `rows` may take.
        read: number of rows in one epoch.
    """
    limited = trainer.estimated_stepping_batches
    if limited != math.inf:
        return int(limited)
    return min(math.ceil(rows * int(trainer.num_training_batches) / read), most)
