"""Trees of sentences, and how well predicted distances or depths agree with them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.csgraph import minimum_spanning_tree, shortest_path
from scipy.stats import rankdata
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aligners.datamodules.text.annotated.sentence import Sentence, check_tree
from aligners.errors import UserError
from aligners.probing.probe_bank import Bank, Examples, Words, answers
from aligners.probing.probing_tasks import Row, pooled_ratio

LEAST = 2  # words of a tree: one word has no distances
WORDS = range(7, 14)  # of a sentence that is drawn: its tree is no trifle, and fits on a page


Edge = tuple[int, int]  # two words, the earlier one first, counted from 0


class TreesPart(NamedTuple):
    """Trees of b sentences of up to T words, padded.

    Attributes:
        rows: (b, T) the row of each word; 0 where there is none.
        real: (b, T) where there is a word.
        depths: (b, T).
        distances: (b, T, T).
        sentences: their numbers.
    """

    rows: Tensor
    real: Tensor
    depths: Tensor
    distances: Tensor
    sentences: list[int]


@dataclass(frozen=True)
class Trees:
    """Depths and distances in the trees of sentences.

    Attributes:
        depths: number of the sentence -> (n,) float32.
        distances: number of the sentence -> (n, n) float32.
    """

    depths: dict[int, Tensor]
    distances: dict[int, Tensor]

    @classmethod
    def of(cls, words: Words) -> Self:
        """The trees of all sentences that have one, of two words or more.

        Raises:
            ValueError: none has, or heads make no tree.
        """
        heads = {
            b: sentence.heads
            for b, sentence in enumerate(words.sentences)
            if len(sentence.heads) >= LEAST
        }
        if not heads:
            raise UserError(
                f"Expected sentences with trees for structural probes, but none of {len(words.sentences)} has one: all "
                "heads are missing. Leave distance and depth out of `tasks`, or give a treebank."
            )
        for tree in heads.values():
            check_tree(tree)
        distances = {b: tree_distances(tree) for b, tree in heads.items()}
        return cls({b: distances[b][tree.index(0)] for b, tree in heads.items()}, distances)

    @property
    def sentences(self) -> list[int]:
        """Numbers of the sentences that have a tree."""
        return list(self.depths)

    def part(self, words: Words, sentences: Sequence[int]) -> TreesPart:
        """The trees of some sentences, whose rows are counted from 0, on the device of the states."""
        chosen, device = list(sentences), words.states.device
        depths = pad_sequence([self.depths[b] for b in chosen], batch_first=True)
        columns, lengths = torch.arange(depths.shape[1]), words.first.diff()[chosen]
        real = columns < lengths[:, None]
        rows = (words.starts(chosen)[:, None] + columns).where(real, 0)
        distances = torch.zeros(*depths.shape, depths.shape[1])
        for place, (b, n) in enumerate(zip(chosen, lengths.tolist(), strict=True)):
            distances[place, :n, :n] = self.distances[b]
        return TreesPart(
            rows.to(device), real.to(device), depths.to(device), distances.to(device), chosen
        )


def tree_distances(heads: Sequence[int]) -> Tensor:
    """Number of edges between two words, (n, n) float32.

    Args:
        heads: of each word the number of its head, counted from 1; 0 for the root. They make a tree.
    """
    edges = np.zeros((len(heads),) * 2)
    for pair in tree_edges(heads):
        edges[pair] = 1
    return torch.from_numpy(shortest_path(edges, directed=False)).float()


def tree_edges(heads: Sequence[int]) -> set[Edge]:
    """The edges of a tree, the root's own none of them."""
    pairs = ((word, head - 1) for word, head in enumerate(heads) if head)
    return {(min(pair), max(pair)) for pair in pairs}


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
        """The probe, and numbers of sentences and targets, for the report."""
        return {
            "probe": self.probe,
            "n_sentences": self.sentences,
            "n_targets": int(self.lengths.sum()),
        }

    def measures(self, weights: Tensor) -> dict[str, Tensor]:
        """Each measure, (A, R), where a sentence counts as often as `weights` (R, B) say."""
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
    of_length = (
        lengths[:, None] == torch.tensor([n for n in lengths.unique().tolist() if n in LENGTHS])
    ).double()
    known = values.isfinite()
    counted = (
        torch.ones(1, len(lengths), dtype=torch.float64) if weights is None else weights.double()
    )
    sums = torch.einsum("rb,ab,bl->arl", counted, values.nan_to_num().double() * known, of_length)
    shares = torch.einsum("rb,ab,bl->arl", counted, known.double(), of_length)
    means = (sums / shares).nanmean(-1)
    return means[:, 0] if weights is None else means


def spanning_edges(predicted: Numbers, kept: NDArray[np.bool_]) -> set[Edge]:
    """The edges of the minimum spanning tree of distances between the words that are kept.

    Args:
        predicted: (n, n), of which the upper triangle counts; rounding may have left zeros a little below zero.
        kept: (n,).
    """
    words = kept.nonzero()[0]
    lengths = predicted[np.ix_(words, words)]
    spanning = minimum_spanning_tree(
        np.triu(lengths - lengths.min() + 1, 1)
    ).tocoo()  # zero would be no edge at all
    pairs = zip(words[spanning.row].tolist(), words[spanning.col].tolist(), strict=True)
    return {(min(pair), max(pair)) for pair in pairs}


def punctuation(sentence: Sentence) -> NDArray[np.bool_]:
    """(n,) which words are punctuation, as far as parts of speech say so."""
    marks = np.zeros(len(sentence.words), dtype=bool)
    for target in sentence.targets:
        if target.task == "pos" and PUNCTUATION in target.labels:
            marks[target.span1[0]] = True
    return marks


def counted_edges(sentence: Sentence) -> set[Edge]:
    """The edges of a sentence's tree that UUAS asks for: those between words that are no punctuation."""
    counted = ~punctuation(sentence)
    return {pair for pair in tree_edges(sentence.heads) if counted[list(pair)].all()}


def predictions(bank: Bank, examples: Examples) -> Iterator[tuple[int, Numbers]]:
    """What structural probes predict of each tree.

    Yields:
        The number of the sentence, and (A, n, n) distances or (A, n) depths.
    """
    for part, predicted in answers(bank, examples):
        numbers = predicted.double().cpu().numpy()
        for place, (sentence, n) in enumerate(
            zip(part.sentences, part.real.sum(1).tolist(), strict=True)
        ):
            yield (
                sentence,
                numbers[:, place, :n] if numbers.ndim == 3 else numbers[:, place, :n, :n],
            )


def tree_scores(
    probe: str,
    predicted: Iterable[tuple[int, Numbers]],
    sentences: Sequence[Sentence],
    trees: Trees,
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
    scores = [
        score(prediction, sentences[number], trees, number) for number, prediction in predicted
    ]
    spearman, hits, totals, lengths = zip(*scores, strict=True)
    return TreeScores(
        probe,
        torch.from_numpy(np.stack(spearman, 1)),
        torch.tensor(hits, dtype=torch.float64).T,
        torch.tensor(totals, dtype=torch.float64),
        torch.tensor(lengths),
    )


Found = tuple[Numbers, list[int], int, int]  # correlations, hits, what is asked for, words


def _distances(predicted: Numbers, sentence: Sentence, trees: Trees, number: int) -> Found:
    counted, edges = ~punctuation(sentence), counted_edges(sentence)
    correlations = rank_correlations(predicted, trees.distances[number].double().numpy())
    with np.errstate(invalid="ignore"):  # a prediction that is constant has no correlation
        spearman = np.nansum(correlations, -1) / np.isfinite(correlations).sum(-1)
    hits = [
        len(edges & spanning_edges(distances, counted)) if edges else 0 for distances in predicted
    ]
    return spearman, hits, len(edges), len(counted)


def _depths(predicted: Numbers, sentence: Sentence, trees: Trees, number: int) -> Found:
    counted = ~punctuation(sentence)
    least = np.where(counted | ~counted.any(), predicted, np.inf).argmin(-1)
    spearman = rank_correlations(predicted, trees.depths[number].double().numpy())
    return spearman, (least == sentence.heads.index(0)).tolist(), 1, len(counted)


def chain(trees: Trees, probe: str) -> Iterator[tuple[int, Numbers]]:
    """Predictions of a baseline that knows the order of the words alone: each hangs on the one before it."""
    for number, depths in trees.depths.items():
        place = np.arange(len(depths), dtype=float)
        yield number, (place if probe == "depth" else np.abs(place[:, None] - place))[None]


def drawn_trees(bank: Bank, words: Words, count: int, model: str) -> Iterator[dict[str, Any]]:
    """The first sentences of a fitting length, with the edges of their trees and those that a probe finds.

    Args:
        bank: of one distance probe.
        words: held-out words.
        count: how many sentences.
        model: its name.

    Yields:
        Rows with the words, and edges as `0-1 1-3`; `counted` are those of the tree that UUAS counts.
    """
    trees = Trees.of(words)
    chosen = [number for number, depths in trees.depths.items() if len(depths) in WORDS][:count]
    for number, predicted in predictions(bank, Examples(words, trees, chosen)):
        sentence = words.sentences[number]
        every = {
            "edges": tree_edges(sentence.heads),
            "counted": counted_edges(sentence),
            "found": spanning_edges(predicted[0], ~punctuation(sentence)),
        }
        written = {
            name: " ".join(f"{a}-{b}" for a, b in sorted(edges)) for name, edges in every.items()
        }
        yield {"model": model, "layer": bank.arms[0].layer, "words": sentence.text, **written}
