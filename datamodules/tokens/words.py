"""Finds the word of the text that each token belongs to.

A word is a run of characters without white space, as in Wu et al. (2020). No tokenizer decides what a word is, so that
words can be paired between any two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Encoding

__all__ = ["number_words"]

WHITE_SPACE = np.array([code for code in range(0x3001) if chr(code).isspace()], dtype=np.uint32)  # U+3000 is the last


def number_words(
    texts: Sequence[Sequence[str]], kept: Sequence[Encoding], whole: Sequence[Encoding]
) -> tuple[list[list[int]], list[int]]:
    """Number the word that each piece belongs to, from the pieces' places in the text.

    A piece belongs to the word that its characters lie in, with or without the white space before or after
    it. What lies in white space alone, in no text (special tokens) or reaches over white space belongs to none,
    and in the last case the words that it touches are missing.

    Args:
        texts: B texts, each of one part, or of two for sentence pairs: words of the second part are numbered
            after those of the first.
        kept: what the tokenizer made of each text, cut to the longest allowed.
        whole: the same, not cut; the very same object where there was nothing to cut.

    Returns:
        For each text the word of each kept piece, counted from 0, -1 for none and for words that are missing: that
        have no pieces, or of which a piece was cut. And the number of words of each text, missing or not.
    """
    table = _Table(texts)
    first, last = table.touched(kept)
    complete = _pieces_per_word(first, last, table.total)
    if any(a is not b for a, b in zip(kept, whole, strict=True)):
        complete *= complete == _pieces_per_word(*table.touched(whole), table.total)
    inside = (first == last) & (complete[first] > 0)
    owner = np.repeat(np.arange(len(kept)), [len(one) for one in kept])
    numbers = np.where(inside, first - table.base[owner], -1).tolist()
    ends = np.cumsum([0, *(len(one) for one in kept)]).tolist()
    return [numbers[a:b] for a, b in pairwise(ends)], table.counts.tolist()


class _Table:
    """Where words begin and end in B texts of P parts each. Texts are laid end to end and words numbered throughout.

    Attributes:
        base: (B,) number of each text's first word.
        counts: (B,) words of each text.
        total: words of all texts.
    """

    def __init__(self, texts: Sequence[Sequence[str]]) -> None:
        parts = list(chain.from_iterable(texts))
        lengths = np.array([len(part) + 1 for part in parts])
        start = np.cumsum(lengths) - lengths
        flat = "".join(f"{part} " for part in parts).encode("utf-32-le", "surrogatepass")
        word = ~np.isin(np.frombuffer(flat, dtype=np.uint32), WHITE_SPACE)
        before = np.concatenate([[False], word[:-1]])
        # At place i, between the characters i - 1 and i: words that begin before it, words that are over by it.
        self._begun = np.concatenate([[0], np.cumsum(word & ~before)])
        self._over = np.cumsum(~word & before)
        self._start = start.reshape(len(texts), -1)
        self.base = self._begun[self._start[:, 0]]
        self.total = int(self._begun[-1])
        self.counts = np.diff(self.base, append=self.total)

    def touched(self, encodings: Sequence[Encoding]) -> tuple[np.ndarray, np.ndarray]:
        """The first and last word that each piece touches; -1 and -2 if it touches none."""
        owner = np.repeat(np.arange(len(encodings)), [len(one) for one in encodings])
        offsets = np.array([pair for one in encodings for pair in one.offsets], dtype=np.int64).reshape(-1, 2)
        part = np.array([-1 if p is None else p for one in encodings for p in one.sequence_ids], dtype=np.int64)
        begin, end = self._start[owner, part] + offsets.T
        first, last = self._over[begin], self._begun[end] - 1
        some = (part >= 0) & (begin < end) & (first <= last)
        return np.where(some, first, -1), np.where(some, last, -2)


def _pieces_per_word(first: np.ndarray, last: np.ndarray, total: int) -> np.ndarray:
    """Count the pieces in each word; 0 if a piece reaches out of it. One more entry, always 0, stands for no word."""
    counts = np.bincount(first[first == last], minlength=total + 1)
    for a, b in zip(first[first < last], last[first < last], strict=True):
        counts[a : b + 1] = 0
    return counts
