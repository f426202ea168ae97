"""Reads the moments of the fitting texts, which every map needs before it is used or trained."""

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

__all__ = ["read_moments"]


def read_moments(
    trainer: pl.Trainer,
    loader: DataLoader,
    rows: Callable[[Any], Mapping[str, tuple[Tensor, Tensor]]],
    check: FiniteCheck,
    batches: int,
) -> dict[str, Moments]:
    """Moments of the paired rows that all ranks together read, exact over ranks.

    Args:
        trainer: of the run; a progress bar is shown if it has one.
        loader: this rank's share of the fitting texts.
        rows: reads a batch of the loader and returns, for each bank, x (S, N, d_x) and y (S, N, d_y).
        check: what `rows` watches the states with; flushed at the end.
        batches: the most batches to read.

    Returns:
        The moments of each bank, at its S site pairs.

    Raises:
        ValueError: a state is not finite.
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
