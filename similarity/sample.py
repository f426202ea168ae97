"""A sample of rows that depends only on its seed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from similarity.moments import DoubleMetric

__all__ = ["FREE", "RowSample", "Sample", "admit_", "row_keys", "smallest"]

# SplitMix64's increment and its two factors, as int64.
_STEP, _FACTORS = 0x9E3779B97F4A7C15 - 2**64, (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
FREE = torch.iinfo(torch.int64).max  # the key of an empty place: greater than any row's


class Sample(NamedTuple):
    """k paired rows, in the order of their keys.

    Attributes:
        x: (L_x, k, d_x); y: (L_y, k, d_y).
        text: id of the text of each row, (k,) int64.
    """

    x: Tensor
    y: Tensor
    text: Tensor


def row_keys(seed: int, text: Tensor, token: Tensor) -> Tensor:
    """Pseudo-random keys of rows, (N,) int64 in [0, 2⁶³): a hash of seed, text and token alone.

    The finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"),
    applied after each of the three. 64-bit products wrap, as they do there.

    Args:
        seed: any int64.
        text: (N,) int64 ids of texts.
        token: (N,) int64 places of rows in their texts.
    """
    state = torch.full_like(text, seed)
    for part in (torch.zeros_like(text), text, token):
        state = _mixed((state ^ part) + _STEP)
    return state & FREE


class RowSample(DoubleMetric):
    """The `budget` rows with the smallest keys among all rows seen on all ranks.

    A key is a hash of the seed, the row's text and its place in it, so the sample is the same for any batches, any
    order and any number of ranks, ranks without rows included. A row that comes twice, as from a sampler that evens
    out ranks, is kept once. Where fewer rows come than the budget, all are kept.

    Args:
        budget: the most rows to keep.
        layers_x: L_x; layers_y: L_y.
        d_x: width of X's states; d_y: width of Y's.
        seed: each seed gives another sample.
        dtype: in which rows are kept. Memory is budget · (L_x d_x + L_y d_y) of it, from the start.

    Raises:
        ValueError: `budget` is not positive.
    """

    full_state_update = True  # for `forward`: the state is not a sum
    is_differentiable = False
    key: Tensor
    text: Tensor
    x: Tensor
    y: Tensor

    def __init__(
        self,
        budget: int,
        layers_x: int,
        layers_y: int,
        d_x: int,
        d_y: int,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if budget < 1:
            raise ValueError(f"Expected `budget` (rows to keep) of at least 1, but got {budget}.")
        self.budget, self.seed = budget, seed
        # Equal shapes on all ranks, whatever they have seen, so that gathering can neither hang nor fail.
        self.add_state("key", torch.full((budget,), FREE), dist_reduce_fx=None)
        self.add_state("text", torch.zeros(budget, dtype=torch.int64), dist_reduce_fx=None)
        self.add_state("x", torch.zeros(layers_x, budget, d_x, dtype=dtype), dist_reduce_fx=None)
        self.add_state("y", torch.zeros(layers_y, budget, d_y, dtype=dtype), dist_reduce_fx=None)

    def update(self, x: Tensor, y: Tensor, text: Tensor, token: Tensor) -> None:
        """Offer paired rows.

        Args:
            x: (L_x, N, d_x).
            y: (L_y, N, d_y).
            text: (N,) id of each row's text, the same whenever the text is read.
            token: (N,) place of each row in its text, padding not counted, so that it does not depend on the batch.

        Raises:
            ValueError: the four do not have as many rows.
        """
        counts = {"x": x.shape[1], "y": y.shape[1], "text": len(text), "token": len(token)}
        if len(set(counts.values())) > 1:
            raise ValueError(f"Expected `x`, `y`, `text` and `token` with as many rows, but got {counts}.")
        text, token = (ids.to(self.key.device, torch.int64) for ids in (text, token))
        if self.x.is_inference() and not torch.is_inference_mode_enabled():
            for name in ("key", "text", "x", "y"):  # inference tensors cannot be written to
                setattr(self, name, getattr(self, name).clone())
        places, rows = admit_(self.key, self.text, row_keys(self.seed, text, token), text)
        self.x[:, places], self.y[:, places] = x[:, rows].to(self.x.dtype), y[:, rows].to(self.y.dtype)

    def compute(self) -> Sample:
        """The `Sample` of everything seen on all ranks."""
        key, text, x, y = self.key, self.text, self.x, self.y
        if key.ndim == 2:  # gathered: (ranks, ...)
            key, text = key.flatten(), text.flatten()
            x, y = (rows.transpose(0, 1).flatten(1, 2) for rows in (x, y))
        _, order = smallest(key, self.budget)
        return Sample(x[:, order], y[:, order], text[order])


def admit_(key: Tensor, text: Tensor, offered: Tensor, offered_text: Tensor) -> tuple[Tensor, Tensor]:
    """Let the offered rows with the smallest keys into a sample, in the places of those with the largest.

    Args:
        key: of the rows in the sample, (budget,), `FREE` where a place is free; changed in place.
        text: ids of their texts, likewise.
        offered: keys of rows, (N,).
        offered_text: ids of their texts, (N,).

    Returns:
        Places of the sample and numbers of the offered rows that belong there, (K,) each.
    """
    budget = len(key)
    _, order = smallest(torch.cat([key, offered]), budget)
    rows = order[order >= budget] - budget
    free = torch.ones_like(key, dtype=torch.bool)
    free[order[order < budget]] = False
    places = free.nonzero()[: len(rows), 0]
    key[places], text[places] = offered[rows], offered_text[rows]
    return places, rows


def smallest(key: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """The `budget` smallest keys, each once, in order, and their places; fewer where fewer are taken."""
    key, order = key.sort(stable=True)
    first = key < FREE
    first[1:] &= key[1:] != key[:-1]  # a row may come twice, from two ranks or from a sampler that evens them out
    return key[first][:budget], order[first][:budget]


def _mixed(state: Tensor) -> Tensor:
    """SplitMix64's finaliser."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        state = (state ^ _shifted(state, shift)) * factor
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; int64 would extend the sign."""
    return (state >> bits) & (2 ** (64 - bits) - 1)
