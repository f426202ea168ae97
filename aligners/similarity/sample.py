"""A sample of rows that depends only on its seed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["FREE", "Sample", "admit_", "row_keys", "smallest"]

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
