"""The accumulator that every measure and every closed-form map on moments shares."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from similarity.functional.moments import Moments, merge_moments, moments_of

__all__ = ["MomentsMetric"]


class MomentsMetric(Metric):
    """Moments of all rows seen, over batches and ranks, in one pass.

    Each rank keeps centred moments, so no mean has to be known beforehand. They are gathered, not summed,
    and merged pairwise: the result is the same for any split of the rows to about 1e-12.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
    """

    full_state_update = False
    is_differentiable = False
    n: Tensor
    mean_x: Tensor
    mean_y: Tensor
    xx: Tensor
    yy: Tensor
    xy: Tensor

    def __init__(self, sites: int, d_x: int, d_y: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        shapes = {
            "n": (),
            "mean_x": (sites, d_x),
            "mean_y": (sites, d_y),
            "xx": (sites, d_x, d_x),
            "yy": (sites, d_y, d_y),
            "xy": (sites, d_x, d_y),
        }
        for name in Moments._fields:
            self.add_state(name, torch.zeros(shapes[name], dtype=torch.float64), dist_reduce_fx=None)

    def update(self, x: Tensor, y: Tensor) -> None:
        """Add paired rows: x (S, N, d_x), y (S, N, d_y)."""
        merged = merge_moments(self._moments(), moments_of(x, y))
        for name in Moments._fields:
            setattr(self, name, getattr(merged, name))

    def compute(self) -> Moments:
        """Moments of everything seen on all ranks."""
        if self.n.ndim == 0:
            return self._moments()
        ranks = [Moments(*(getattr(self, name)[rank] for name in Moments._fields)) for rank in range(len(self.n))]
        merged = ranks[0]
        for moments in ranks[1:]:
            merged = merge_moments(merged, moments)
        return merged

    def _moments(self) -> Moments:
        return Moments(*(getattr(self, name) for name in Moments._fields))
