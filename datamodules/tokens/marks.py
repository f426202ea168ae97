"""Marks on the rows of tokenised texts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Marks"]


@dataclass
class Marks:
    """A mark on some rows of a split.

    Attributes:
        flat: (R,) True for the rows that are marked, text by text.
        counts: (n,) rows of each text.
    """

    flat: Tensor
    counts: Tensor

    def __post_init__(self) -> None:
        self.ends = self.counts.cumsum(0)

    def of(self, texts: Tensor) -> Tensor:
        """The marks of the rows of the texts with these numbers: (B,) -> (N,)."""
        counts = self.counts[texts]
        shift = self.ends[texts] - counts.cumsum(0)
        return self.flat[torch.arange(int(counts.sum())) + shift.repeat_interleave(counts)]

    def texts_with_rows(self) -> Tensor:
        """The numbers of the texts that have a row without a mark."""
        kept = torch.cat([torch.zeros(1, dtype=torch.int64), (~self.flat).cumsum(0)])
        return (kept[self.ends] > kept[self.ends - self.counts]).nonzero()[:, 0]
