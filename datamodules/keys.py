"""Pseudo-random keys of rows, which depend on a seed and on the row alone."""

from __future__ import annotations

import torch
from torch import Tensor

# SplitMix64's increment and its two factors, as int64.
_STEP, _FACTORS = 0x9E3779B97F4A7C15 - 2**64, (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
FREE = torch.iinfo(torch.int64).max  # the key of an empty place: greater than any row's


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
        state = (state ^ part) + _STEP
        for shift, factor in zip((30, 27), _FACTORS, strict=True):
            state = (state ^ _shifted(state, shift)) * factor
        state = state ^ _shifted(state, 31)
    return state & FREE


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; int64 would extend the sign."""
    return (state >> bits) & (2 ** (64 - bits) - 1)
