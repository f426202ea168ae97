"""A sample of rows that depends only on its seed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from aligners.similarity.passes.ranks import collected, summed, this_rank
from datamodules.rows.policies import FREE, row_keys


class Sample(NamedTuple):
    """k paired rows, in the order of their keys.

    Attributes:
        x: (L_x, k, d_x); y: (L_y, k, d_y).
        text: id of the text of each row, (k,) int64.
    """

    x: Tensor
    y: Tensor
    text: Tensor

    def __add__(self, other: object) -> Sample:
        """The rows of both."""
        if not isinstance(other, Sample):
            return NotImplemented
        x, y = torch.cat([self.x, other.x], 1), torch.cat([self.y, other.y], 1)
        return Sample(x, y, torch.cat([self.text, other.text]))

    def pair(self, i: int, j: int) -> Sample:
        """The rows of one layer of X and one of Y, by index."""
        return Sample(self.x[i : i + 1], self.y[j : j + 1], self.text)


class Draw:
    """Which rows of a stream are in its sample: the same of all models, whatever the batches and the ranks.

    Args:
        budget: the most rows.
        seed: each seed gives another sample.
        device: where the rows are.

    Attributes:
        key: of the rows in the sample, (budget,), `FREE` where a place is free.
        text: ids of their texts, likewise.
    """

    def __init__(self, budget: int, seed: int, device: torch.device | None = None) -> None:
        self.seed = seed
        self.key = torch.full((budget,), FREE, device=device)
        self.text = torch.zeros(budget, dtype=torch.int64, device=device)
        self.order = torch.empty(0, dtype=torch.int64, device=device)

    def admit(self, text: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Let rows with the smallest keys into the sample, in the places of those with the largest.

        Args:
            text: (N,) ids of the texts of a batch's rows.
            token: (N,) places of the rows in their texts.

        Returns:
            Places of the sample and numbers of the rows that belong there, (K,) each.
        """
        budget, offered = len(self.key), row_keys(self.seed, text, token)
        _, order = _smallest(torch.cat([self.key, offered]), budget)
        rows = order[order >= budget] - budget
        free = torch.ones_like(self.key, dtype=torch.bool)
        free[order[order < budget]] = False
        places = free.nonzero()[: len(rows), 0]
        self.key[places], self.text[places] = offered[rows], text[rows]
        return places, rows

    def end(self, groups: int) -> None:
        """Choose among the rows of all ranks, and put them in the order of groups of texts.

        `order` then has their places in the samples of all ranks laid end to end, and `text` their texts.
        """
        every = collected((self.key.cpu(), self.text.cpu()))
        key, text = (torch.cat(parts).to(self.key.device) for parts in zip(*every, strict=True))
        _, order = _smallest(key, len(self.key))
        self.order = order[(text[order] % groups).argsort(stable=True)]
        self.text = text[self.order]

    def collect(self, rows: Tensor) -> Tensor:
        """The rows of all ranks in that order, (L, k, d), in the memory of this rank's rows (L, budget, d)."""
        budget = len(self.key)
        here = (self.order // budget == this_rank()).nonzero()[:, 0]
        for layer in rows:  # one at a time, for the memory
            chosen = layer.new_zeros(len(self.order), layer.shape[1])
            chosen[here] = layer[self.order[here] % budget]
            layer[: len(chosen)] = summed(chosen)
        return rows[:, : len(self.order)]


def _smallest(key: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """The `budget` smallest keys, each once, in order, and their places; fewer where fewer are taken."""
    key, order = key.sort(stable=True)
    first = key < FREE
    first[1:] &= key[1:] != key[:-1]  # a row may come twice, from two ranks or from a sampler that evens them out
    return key[first][:budget], order[first][:budget]
