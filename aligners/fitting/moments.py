"""Reading the moments of the fitting texts, which every map needs before it is used or trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import lightning.pytorch as pl
from rich.progress import track
from torch import Tensor
from torch.utils.data import DataLoader

from frozen.finite import FiniteCheck
from similarity.functional.moments import Moments
from similarity.moments import MomentsMetric

__all__ = ["limited", "read_moments"]


def read_moments(
    trainer: pl.Trainer,
    loader: DataLoader,
    rows: Callable[[Any], Mapping[str, tuple[Tensor, Tensor]]],
    check: FiniteCheck,
    batches: int,
) -> dict[str, Moments]:
    """Moments of paired rows, exact over ranks: what all of them have read together.

    Args:
        trainer: of the run; it has a progress bar or not.
        loader: this rank's share of the fitting texts.
        rows: reads a batch of the loader: name of a bank -> x (S, N, d_x) and y (S, N, d_y).
        check: watches the states that `rows` reads.
        batches: read at most this many.

    Returns:
        Name of a bank -> its moments at S site pairs.

    Raises:
        ValueError: `check` has seen a value that is not finite.
    """
    metrics: dict[str, MomentsMetric] = {}
    count, shown = min(len(loader), batches), trainer.is_global_zero and trainer.progress_bar_callback is not None
    for batch in track(islice(loader, count), "Reading moments", count, transient=True, disable=not shown):
        for name, (x, y) in rows(batch).items():
            if name not in metrics:
                metrics[name] = MomentsMetric(len(x), x.shape[-1], y.shape[-1]).to(x.device)
            metrics[name].update(x, y)
    check.flush()
    return {name: metric.compute() for name, metric in metrics.items()}


def limited(batches: int, limit: float) -> int:
    """How many of so many batches the Trainer reads under a limit such as `limit_train_batches`."""
    return int(batches * limit) if isinstance(limit, float) else min(batches, limit)
