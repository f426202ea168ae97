"""How well predicted distances and depths give a tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.csgraph import minimum_spanning_tree
from scipy.stats import rankdata
from torch import Tensor

from aligners.probing.bank import Bank, Examples, answers
from aligners.probing.tasks import Row, pooled_ratio
from aligners.probing.trees.asked import Edge, Trees, tree_edges
from aligners.probing.words import Words
from datamodules.text.annotated.sentence import Sentence

LENGTHS = range(5, 51)  # words of the sentences over which rank correlations are averaged
PUNCTUATION = "PUNCT"  # universal part of speech
Numbers = NDArray[np.float64]


class TreeScores(NamedTuple):
    """Of each of A probes and each of B trees, float64.

    Attributes:
        probe: distance or depth.
        spearman: (A, B) rank correlation of what is predicted with what is true; NaN where one of them is constant.
        hits: (A, B) edges that are in the tree that is predicted, or 1 if its root is.
        asked: (B,) edges of the tree that count, or 1.
        lengths: (B,) words.
    """

    probe: str
    spearman: Tensor
    hits: Tensor
    asked: Tensor
    lengths: Tensor

    @property
    def sentences(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def about(self) -> Row:
        """As `Scores.about`."""
        return {"probe": self.probe, "n_sentences": self.sentences, "n_targets": int(self.lengths.sum())}

    def measures(self, weights: Tensor) -> dict[str, Tensor]:
        """As `Scores.measures`."""
        spearman = by_length(self.spearman, self.lengths, weights)
        hits = pooled_ratio(self.hits, self.asked, weights)
        return {"Spearman": spearman, "UUAS" if self.probe == "distance" else "root": hits}


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
    for part, found in answers(bank, Examples(words, trees)):
        numbers = found.double().cpu().numpy()
        for place, (sentence, n) in enumerate(zip(part.sentences, part.real.sum(1).tolist(), strict=True)):
            yield sentence, numbers[:, place, :n] if numbers.ndim == 3 else numbers[:, place, :n, :n]


def tree_scores(
    probe: str, predicted: Iterable[tuple[int, Numbers]], sentences: Sequence[Sentence], trees: Trees
) -> TreeScores:
    """Rank correlations, and the edges of the spanning tree or the word of least depth.

    The correlation of distances is taken from each word, and averaged over the words. Punctuation is a word like any
    other there; its edges do not count, as in the paper, and it is never taken for the root.

    Args:
        probe: distance or depth.
        predicted: (A, n, n) distances or (A, n) depths of each tree.
        sentences: by number.
        trees: the true ones.
    """
    score = _distances if probe == "distance" else _depths
    found = [score(each, sentences[number], trees, number) for number, each in predicted]
    spearman, hits, asked, lengths = zip(*found, strict=True)
    return TreeScores(
        probe,
        torch.from_numpy(np.stack(spearman, 1)),
        torch.tensor(hits, dtype=torch.float64).T,
        torch.tensor(asked, dtype=torch.float64),
        torch.tensor(lengths),
    )


Found = tuple[Numbers, list[int], int, int]  # correlations, hits, what is asked for, words


def _distances(predicted: Numbers, sentence: Sentence, trees: Trees, number: int) -> Found:
    kept, edges = ~punctuation(sentence), counted_edges(sentence)
    each = rank_correlations(predicted, trees.distances[number].double().numpy())
    with np.errstate(invalid="ignore"):  # a prediction that is constant has no correlation
        spearman = np.nansum(each, -1) / np.isfinite(each).sum(-1)
    hits = [len(edges & spanning_edges(own, kept)) if edges else 0 for own in predicted]
    return spearman, hits, len(edges), len(kept)


def _depths(predicted: Numbers, sentence: Sentence, trees: Trees, number: int) -> Found:
    kept = ~punctuation(sentence)
    least = np.where(kept | ~kept.any(), predicted, np.inf).argmin(-1)
    spearman = rank_correlations(predicted, trees.depths[number].double().numpy())
    return spearman, (least == sentence.heads.index(0)).tolist(), 1, len(kept)


def chain(trees: Trees, probe: str) -> Iterator[tuple[int, Numbers]]:
    """Predictions of a baseline that knows the order of the words alone: each hangs on the one before it."""
    for number, own in trees.depths.items():
        place = np.arange(len(own), dtype=float)
        yield number, (place if probe == "depth" else np.abs(place[:, None] - place))[None]


WORDS = range(7, 14)  # of a sentence that is drawn: its tree is no trifle, and fits on a page


def drawn_trees(bank: Bank, words: Words, count: int, model: str) -> list[dict[str, Any]]:
    """The first sentences of a fitting length, with the edges of their trees and those that a probe finds.

    Args:
        bank: of one distance probe.
        words: held-out words.
        count: how many sentences.
        model: its name.

    Returns:
        Rows with the words, and edges as `0-1 1-3`; `counted` are those of the tree that UUAS counts.
    """
    trees = Trees.of(words)
    chosen = [number for number, own in trees.depths.items() if len(own) in WORDS][:count]
    few = Trees({b: trees.depths[b] for b in chosen}, {b: trees.distances[b] for b in chosen})
    return [
        {
            "model": model,
            "layer": bank.arms[0].layer,
            "words": words.sentences[number].text,
            "edges": _written(tree_edges(words.sentences[number].heads)),
            "counted": _written(counted_edges(words.sentences[number])),
            "found": _written(spanning_edges(predicted[0], ~punctuation(words.sentences[number]))),
        }
        for number, predicted in predictions(bank, words, few)
    ]


def _written(edges: set[Edge]) -> str:
    return " ".join(f"{first}-{second}" for first, second in sorted(edges))
