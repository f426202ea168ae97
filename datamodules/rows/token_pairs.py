"""Rows that are pairs of tokens, for attention weights, and the keys that draw rows independently of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.rows.policies import RowKind, Rows, rows_of_each

FREE = torch.iinfo(torch.int64).max  # the key of an empty place: above any row's
LONGEST = 2**31  # in tokens: more than any text has
# SplitMix64's increment, its shifts and its factors, as int64.
INCREMENT = 0x9E3779B97F4A7C15 - 2**64
ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def row_keys(seed: int, text: Tensor, token: Tensor) -> Tensor:
    """Pseudo-random keys of rows, (N,) int64 in [0, 2⁶³): a hash of seed, text and token alone.

    The finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"),
    applied after each of the three numbers. 64-bit products wrap, as in the paper.

    Args:
        seed: any int64.
        text: (N,) int64 ids of texts.
        token: (N,) int64 places of rows in their texts.
    """
    state = torch.full_like(text, seed)
    for part in (0, text, token):
        state ^= part
        state += INCREMENT
        for bits, factor in ROUNDS:
            state ^= _shifted(state, bits)
            state *= factor
        state ^= _shifted(state, 31)
    return state & FREE


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Shift to the right without extending the sign, as int64 would."""
    return (state >> bits) & (2 ** (64 - bits) - 1)


@dataclass(frozen=True)
class TokenPairs:
    """Draws pairs of a token and one that it attends to as rows, text by text whatever the batch; on the CPU.

    With `mean`, a row is a token and the mean weight that it gets from all tokens that can attend to it.

    Attributes:
        special_tokens: whether special tokens attend and are attended to.
        causal: whether tokens attend to earlier tokens only.
        share: share of all such rows that are drawn.
        seed: seed of the draw.
        mean: whether rows are means over the attending tokens.
    """

    special_tokens: bool
    causal: bool
    share: float
    seed: int
    mean: bool = False

    def rows(self, texts: TextBatch) -> Rows:
        """Return the rows of a batch, as places in weights (B, T · T)."""
        kind = RowKind("tokens", self.special_tokens)
        tokens = rows_of_each(texts, kind)[0]
        counts = torch.tensor(tokens.counts)
        owner, query, key = self._drawn(texts.text, counts)

        length = texts.inputs_x["input_ids"].shape[1]
        place_in_text = tokens.index % length
        first_of_text = counts.cumsum(0) - counts
        first = first_of_text[owner]
        looking = place_in_text[first + query]
        looked_at = place_in_text[first + key]
        begins = (owner * length + looking) * length
        index = begins + looked_at
        if not self.mean:
            return Rows(index, owner, len(counts))

        number = owner * length + key
        unique = torch.unique(number, return_inverse=True, return_counts=True)
        target, row, queries = unique
        share = 1 / queries[row].float()
        return Rows(index, target // length, len(counts), share, row)

    def _drawn(self, text: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return text, attending token and attended token of each drawn pair, all counted from 0."""
        place = torch.arange(int(counts.max()))
        real = place < counts[:, None]
        pairs = real[:, :, None] & real[:, None]
        if self.causal:
            pairs &= place[:, None] >= place
        owner, query, key = pairs.nonzero(as_tuple=True)

        token = key
        if not self.mean:
            token = query * LONGEST + key
        most = min(int(self.share * FREE), FREE)
        taken = row_keys(self.seed, text[owner], token) <= most
        return owner[taken], query[taken], key[taken]
