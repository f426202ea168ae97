"""Figures over all ranks."""

from __future__ import annotations

from typing import cast

import lightning.pytorch as pl
from torch import Tensor


def mean_over_ranks(trainer: pl.Trainer, values: Tensor) -> Tensor:
    """Return the mean of all ranks' `values`, on every rank. All ranks have to call it."""
    if trainer.world_size == 1:
        return values
    return cast(Tensor, trainer.strategy.reduce(values.clone(), reduce_op="mean"))
