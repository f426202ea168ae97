"""Attention between tokens folded to attention between words, which two tokenizers have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Folded", "fold", "real_pairs", "word_pairs"]


class Folded(NamedTuple):
    """Attention between the words of B texts, in float64.

    Attributes:
        weights: (L, H, B, W, W), the weight from word i to word j at [..., i, j]. A row sums to one over the words
            of its text; beyond them everything is zero.
        mass: (L, H, B, W), the share of the word's attention that stayed on words, before rows were made to sum to
            one: the rest went to special tokens and to tokens of no word.
    """

    weights: Tensor
    mass: Tensor


def fold(weights: Sequence[Tensor], word: Tensor, words: Tensor) -> Folded:
    """Attention between words: summed to their tokens, averaged from them (Wu et al. 2020, §4; Clark et al. 2019).

    Attention to special tokens is dropped, so that what is left of a row no longer sums to one; each row is divided
    by what is left. Two models whose tokenizers differ are folded with the same numbers of words: their weights
    then pair up entry by entry. One-hot products, in float64, one block after the other.

    Args:
        weights: of L blocks, (L, B, H, T, T) or a sequence of (B, H, T, T).
        word: (B, T) number of the word of each token, counted from 0 in each text; -1 where a token belongs to none
            that counts (special tokens, padding, words that the other model does not see).
        words: (B,) number of words of each text, at least 1.

    Raises:
        ValueError: the shapes do not fit, a word has no token or a token no word below `words`, or a head leaves
            nothing on the words of a text.
    """
    _check_words(weights, word, words)
    member = word[:, :, None] == torch.arange(int(words.max()), device=word.device)  # (B, T, W)
    counts = member.sum(1)
    real = torch.arange(counts.shape[1], device=word.device) < words[:, None]
    if not torch.equal(counts > 0, real) or bool((word >= words[:, None]).any()):
        raise ValueError(
            "Expected `word` to number the words of each text from 0 to `words` - 1 and each of them to have a token, "
            "but got a word without one, or a number beyond. Give words that a model cuts off, or that one "
            "model does not see, the number -1 and count the others anew."
        )
    to = member[:, None].double()
    of = (member / counts.clamp(min=1)[:, None]).double().mT[:, None]  # the mean over a word's tokens
    folded = torch.stack([(of @ (each.double() @ to)).transpose(0, 1) for each in weights])
    mass = folded.sum(-1)
    if not bool((mass[..., real] > 0).all()):
        block, head, text, place = (int(i) for i in ((mass > 0) != real).nonzero()[0])
        raise ValueError(
            f"Expected every head to leave some attention on words, but head {head + 1} of block {block + 1} puts "
            f"all that word {place} of text {text} of the batch has on other tokens, or it is NaN: there is no "
            "distribution over words. Load the model in float32, or drop that text."
        )
    return Folded(folded / mass.where(real, 1)[..., None], mass)


def real_pairs(words: Tensor, width: int) -> Tensor:
    """Which entries (B, W, W) are pairs of words of a text that has at least two; W is `width`.

    One word attends to itself alone, whatever the head: such a text says nothing about heads.
    """
    real = torch.arange(width, device=words.device) < words.where(words > 1, 0)[:, None]
    return real[:, :, None] & real[:, None, :]


def word_pairs(weights: Tensor, words: Tensor) -> Tensor:
    """Attention as a representation: one row for every pair of words of a text, one feature for every head.

    For the distributed comparison (Wu et al. 2020, §3.5): the rows of two models that were folded with the same
    words are paired, and every measure of representations applies to them. Texts of one word are left out.

    Args:
        weights: (L, H, B, W, W), as `fold` gives them.
        words: (B,) number of words of each text.

    Returns:
        (L, N, H), N the sum of the squared numbers of words; rows by text, then from-word, then to-word.
    """
    return weights[..., real_pairs(words, weights.shape[-1])].mT


def _check_words(weights: Sequence[Tensor], word: Tensor, words: Tensor) -> None:
    shapes = sorted({tuple(each.shape) for each in weights})
    if len(shapes) != 1 or len(shapes[0]) != 4 or shapes[0][::2] != tuple(word.shape) or shapes[0][2] != shapes[0][3]:
        raise ValueError(
            "Expected `weights` of blocks, each (B, H, T, T), and `word` (B, T), but got weights of "
            f"{', '.join(map(str, shapes)) or 'no block'} and word of {tuple(word.shape)}."
        )
    if words.shape != word.shape[:1] or not len(words) or int(words.min()) < 1:
        raise ValueError(
            f"Expected `words` to count at least one word for each of {len(word)} texts, but got "
            f"{words.tolist()}. Drop texts without words."
        )
