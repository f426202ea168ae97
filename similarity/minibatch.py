"""Unbiased minibatch CKA over a stream of batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from similarity.functional.hsic import HSIC, cka_from_hsic, unbiased_hsic
from similarity.moments import DoubleMetric

__all__ = ["MinibatchCKA"]


class MinibatchCKA(DoubleMetric):
    """Σ HSIC_1(K, L) / √(Σ HSIC_1(K, K) Σ HSIC_1(L, L)) over batches, for all layer pairs (Nguyen et al. 2021).

    Every update is one batch, and every batch counts alike. The state is the three sums: the same batches, given in
    any order to any number of ranks, give the same number. Another cut of the rows into batches is another estimate
    of the same quantity. See `similarity.functional.hsic.minibatch_cka`.

    Args:
        layers_x: L_x, the number of layers of X.
        layers_y: L_y, the number of layers of Y.
    """

    full_state_update = False
    is_differentiable = False
    batches: Tensor

    def __init__(self, layers_x: int, layers_y: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name, zeros in HSIC.zeros(layers_x, layers_y)._asdict().items():
            self.add_state(name, zeros, dist_reduce_fx="sum")
        self.add_state("batches", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, x: Tensor, y: Tensor) -> None:
        """Add a batch of paired rows: x (L_x, N, d_x), y (L_y, N, d_y).

        Raises:
            ValueError: the batch has fewer than 4 rows, for which HSIC_1 is not defined: leave a last batch that is
                too short out, or cut batches evenly. Also where rows are not paired or not finite.
        """
        # Not in place: a state that was reset in inference mode does not allow it.
        for name, value in unbiased_hsic(x, y)._asdict().items():
            setattr(self, name, getattr(self, name) + value)
        self.batches = self.batches + 1

    def compute(self) -> Tensor:
        """CKA of all layer pairs, (L_x, L_y), float64, not clamped.

        Raises:
            ValueError: no batch was seen, or a layer's HSIC with itself is not positive.
        """
        if self.batches == 0:
            raise ValueError("Expected at least one batch before `compute`, but got none. Call `update` first.")
        return cka_from_hsic(self.sums())

    def sums(self) -> HSIC:
        """The three sums so far: over this rank's batches, or within `compute` over those of all ranks."""
        return HSIC(*(getattr(self, name) for name in HSIC._fields))
