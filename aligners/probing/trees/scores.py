"""How well predicted distances and depths give a tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.csgraph import minimum_spanning_tree
from scipy.stats import rankdata
from torch import Tensor

from aligners.probing.bank import Bank, answers
from aligners.probing.trees.asked import Trees, TreesPart
from aligners.probing.trees.shapes import Edge, tree_edges
from aligners.probing.words import Words
from datamodules.text.annotated.sentence import Sentence

__all__ = [
    "LENGTHS",
    "Numbers",
    "TreeScores",
    "by_length",
    "chain",
    "counted_edges",
    "depth_scores",
    "distance_scores",
    "most_spearman",
    "predictions",
    "punctuation",
    "rank_correlations",
    "spanning_edges",
]

LENGTHS = range(5, 51)  # words of the sentences over which rank correlations are averaged
PUNCTUATION = "PUNCT"  # universal part of speech
Numbers = NDArray[np.float64]


class TreeScores(NamedTuple):
    """Of each arm and each of B trees, float64.

    Attributes:
        spearman: (A, B) rank correlation of what is predicted with what is true; NaN where one of them is constant.
        hits: (A, B) edges that are in the tree that is predicted, or 1 if its root is.
        asked: (B,) edges of the tree that count, or 1.
        lengths: (B,) words.
    """

    spearman: Tensor
    hits: Tensor
    asked: Tensor
    lengths: Tensor


def rank_correlations(predicted: Numbers, true: Numbers) -> Numbers:
    """Spearman's correlation along the last axis, NaN where one side is constant.

    Args:
        predicted: (..., n).
        true: (..., n), or broadcast to that.
    """
    a, b = (rankdata(side, axis=-1) for side in (predicted, true))
    a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (a * b).sum(-1) / np.sqrt((a**2).sum(-1) * (b**2).sum(-1))


def most_spearman(true: Numbers) -> Numbers:
    """The greatest rank correlation along the last axis that a prediction without ties can have.

    Distances and depths are whole numbers and many of them are equal. A prediction that is exact but for the last
    digit puts an order on those, too, and every such order has the same correlation: √(V / V'), where V is the
    variance of the true ranks, and V' that of ranks without ties, (n² − 1) / 12.

    Args:
        true: (..., n).
    """
    ranks, n = rankdata(true, axis=-1), true.shape[-1]
    return np.sqrt(12 * ranks.var(-1) / (n**2 - 1))


def by_length(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Tensor:
    """Average over sentences of equal length, then over lengths of 5 to 50 words (Hewitt and Manning 2019, §4.1).

    Args:
        values: (A, B) of each sentence; NaN is no value.
        lengths: (B,) its words.
        weights: (R, B) how often each sentence counts; default: once.

    Returns:
        (A,), or (A, R) with weights; NaN if no sentence counts.
    """
    lengths = lengths.where(torch.tensor([int(n) in LENGTHS for n in lengths]), 0)
    of_length = torch.stack([lengths == n for n in lengths.unique() if n], 1).double() if lengths.any() else None
    known = values.isfinite()
    if of_length is None:
        return values.new_full((len(values), *(weights.shape[:1] if weights is not None else ())), torch.nan)
    counted = torch.ones(1, len(lengths), dtype=torch.float64) if weights is None else weights.double()
    sums = torch.einsum("rb,ab,bl->arl", counted, values.nan_to_num().double() * known, of_length)
    shares = torch.einsum("rb,ab,bl->arl", counted, known.double(), of_length)
    found = (sums / shares).nanmean(-1)
    return found[:, 0] if weights is None else found


def spanning_edges(predicted: Numbers, kept: NDArray[np.bool_]) -> set[Edge]:
    """The edges of the minimum spanning tree of distances between the words that are kept.

    Args:
        predicted: (n, n), of which the upper triangle counts; rounding may have left zeros a little below zero.
        kept: (n,).
    """
    words = kept.nonzero()[0]
    own = predicted[np.ix_(words, words)]
    spanning = minimum_spanning_tree(np.triu(own - own.min() + 1, 1)).tocoo()  # zero would be no edge at all
    pairs = zip(words[spanning.row].tolist(), words[spanning.col].tolist(), strict=True)
    return {(min(pair), max(pair)) for pair in pairs}


def punctuation(sentence: Sentence) -> NDArray[np.bool_]:
    """(n,) which words are punctuation, as far as parts of speech say so."""
    found = np.zeros(len(sentence.words), dtype=bool)
    for target in sentence.targets:
        if target.task == "pos" and PUNCTUATION in target.labels:
            found[target.span1[0]] = True
    return found


def counted_edges(sentence: Sentence) -> set[Edge]:
    """The edges of a sentence's tree that UUAS asks for: those between words that are no punctuation."""
    kept = ~punctuation(sentence)
    return {pair for pair in tree_edges(sentence.heads) if kept[list(pair)].all()}


def predictions(bank: Bank, words: Words, trees: Trees) -> Iterator[tuple[int, Numbers]]:
    """What structural probes predict of each tree.

    Yields:
        The number of the sentence, and (A, n, n) distances or (A, n) depths.
    """
    for part, found in answers(bank, words, trees):
        yield from _unpadded(part, found)


def _unpadded(part: TreesPart, found: Tensor) -> Iterator[tuple[int, Numbers]]:
    numbers = found.double().cpu().numpy()
    for place, (sentence, n) in enumerate(zip(part.sentences, part.real.sum(1).tolist(), strict=True)):
        yield sentence, numbers[:, place, :n] if numbers.ndim == 3 else numbers[:, place, :n, :n]


def distance_scores(found: Iterator[tuple[int, Numbers]], sentences: Sequence[Sentence], trees: Trees) -> TreeScores:
    """Rank correlation of the distances from each word, averaged over the words; edges of the spanning tree.

    Edges of punctuation do not count, as in the paper; for rank correlations it is a word like any other.

    Args:
        found: (A, n, n) of each tree.
        sentences: by number.
        trees: the true ones.
    """
    spearman, hits, asked, lengths = [], [], [], []
    for number, predicted in found:
        kept, edges = ~punctuation(sentences[number]), counted_edges(sentences[number])
        true = trees.distances[number].double().numpy()
        each = rank_correlations(predicted, true)
        with np.errstate(invalid="ignore"):  # a prediction that is constant has no correlation
            spearman.append(np.nansum(each, -1) / np.isfinite(each).sum(-1))
        hits.append([len(edges & spanning_edges(own, kept)) if edges else 0 for own in predicted])
        asked.append(len(edges))
        lengths.append(len(true))
    return _scores(spearman, hits, asked, lengths)


def depth_scores(found: Iterator[tuple[int, Numbers]], sentences: Sequence[Sentence], trees: Trees) -> TreeScores:
    """Rank correlation of the depths of a sentence's words; whether the word of least depth is the root.

    Args:
        found: (A, n) of each tree.
        sentences: by number. Punctuation is never taken for the root.
        trees: the true ones.
    """
    spearman, hits, asked, lengths = [], [], [], []
    for number, predicted in found:
        sentence = sentences[number]
        kept = ~punctuation(sentence)
        least = np.where(kept | ~kept.any(), predicted, np.inf).argmin(-1)
        spearman.append(rank_correlations(predicted, trees.depths[number].double().numpy()))
        hits.append((least == sentence.heads.index(0)).tolist())
        asked.append(1)
        lengths.append(len(sentence.words))
    return _scores(spearman, hits, asked, lengths)


def _scores(
    spearman: Sequence[Numbers], hits: Sequence[Sequence[int]], asked: Sequence[int], lengths: Sequence[int]
) -> TreeScores:
    return TreeScores(
        torch.from_numpy(np.stack(spearman, 1)),
        torch.tensor(hits, dtype=torch.float64).T,
        torch.tensor(asked, dtype=torch.float64),
        torch.tensor(lengths),
    )


def chain(trees: Trees, depth: bool) -> Iterator[tuple[int, Numbers]]:
    """Predictions of a baseline that knows the order of the words alone: each hangs on the one before it."""
    for number, own in trees.depths.items():
        place = np.arange(len(own), dtype=float)
        yield number, (place if depth else np.abs(place[:, None] - place))[None]
