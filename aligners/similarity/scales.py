"""Mean and deviation of every feature of every layer, by which features are standardised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aligners.similarity.moments import DoubleMetric

__all__ = ["FeatureScales"]


class FeatureScales(DoubleMetric):
    """Mean and standard deviation of each feature, over batches and ranks.

    Args:
        layers: L.
        width: d.
    """

    full_state_update = True
    n: Tensor
    sums: Tensor
    squares: Tensor

    def __init__(self, layers: int, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("n", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("sums", torch.zeros(layers, width, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("squares", torch.zeros(layers, width, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, states: Tensor) -> None:
        """Add rows: (L, N, d)."""
        states = states.double()
        self.n += states.shape[1]
        self.sums += states.sum(1)
        self.squares += states.square().sum(1)

    def compute(self) -> tuple[Tensor, Tensor]:
        """Means and deviations, (L, d) each; the deviation of a constant feature is given as 1."""
        mean = self.sums / self.n
        variance = self.squares / self.n - mean.square()
        constant = variance <= (1e-7 * mean).square()  # what float32 leaves of a constant
        return mean, variance.where(~constant, 1).sqrt()
