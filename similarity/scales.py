"""Mean and deviation of every feature of every layer: what standardised features are divided by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["FeatureScales"]


class FeatureScales(Metric):
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
        """Means and deviations, (L, d) each.

        Raises:
            ValueError: a feature does not vary.
        """
        mean = self.sums / self.n
        variance = self.squares / self.n - mean.square()
        # What is left of a constant feature by rounding is below this.
        flat = variance <= 1e-12 * mean.square()
        if flat.any():
            layers = flat.any(1).nonzero()[:, 0].tolist()
            raise ValueError(
                f"Standardised features must vary, but {int(flat.sum())} do not, in the layers number {layers} of "
                "those compared. Leave these layers out, or the controls off."
            )
        return mean, variance.sqrt()
