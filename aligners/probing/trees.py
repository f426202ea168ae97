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
DRAWN_LENGTHS = range(
    7, 14
)  # words of a sentence that is drawn: no trifle, and it fits on a page
LENGTHS = range(
    5, 51
)  # words of the sentences over which rank correlations are averaged
PUNCTUATION = "PUNCT"  # universal part of speech

Edge = tuple[int, int]  # two words, the earlier one first, counted from 0
Numbers = NDArray[np.float64]


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
        trees = cls({}, {})
        for number, sentence in enumerate(words.sentences):
            if len(sentence.heads) < LEAST:
                continue
            check_tree(sentence.heads)
            distances = tree_distances(sentence.heads)
            root = sentence.heads.index(0)
            trees.distances[number] = distances
            trees.depths[number] = distances[root]
        if not trees.depths:
            raise UserError(
                f"Expected sentences with trees for structural probes, but none of {len(words.sentences)} has one: all "
                "heads are missing. Leave distance and depth out of `tasks`, or give a treebank."
            )
        return trees

    @property
    def sentences(self) -> list[int]:
        """Numbers of the sentences that have a tree."""
        return list(self.depths)

    def part(self, words: Words, sentences: Sequence[int]) -> TreesPart:
        """The trees of some sentences, whose rows are counted from 0, on the device of the states."""
        chosen = list(sentences)
        device = words.states.device
        depths = pad_sequence([self.depths[b] for b in chosen], batch_first=True)
        longest = depths.shape[1]

        lengths = words.first.diff()[chosen]
        columns = torch.arange(longest)
        real = columns < lengths[:, None]
        rows = (words.starts(chosen)[:, None] + columns).where(real, 0)

        distances = torch.zeros(len(chosen), longest, longest)
        for place, number in enumerate(chosen):
            n = len(self.depths[number])
            distances[place, :n, :n] = self.distances[number]
        return TreesPart(
            rows.to(device),
            real.to(device),
            depths.to(device),
            distances.to(device),
            chosen,
        )


def tree_distances(heads: Sequence[int]) -> Tensor:
    """Number of edges between two words, (n, n) float32.

    Args:
        heads: of each word the number of its head, counted from 1; 0 for the root. They make a tree.
    """
    edges = np.zeros((len(heads), len(heads)))
    for pair in tree_edges(heads):
        edges[pair] = 1
    return torch.from_numpy(shortest_path(edges, directed=False)).float()


def tree_edges(heads: Sequence[int]) -> set[Edge]:
    """The edges of a tree, without the root's own."""
    edges = set()
    for word, head in enumerate(heads):
        if head:
            edges.add(_edge(word, head - 1))
    return edges


def _edge(a: int, b: int) -> Edge:
    return min(a, b), max(a, b)


class TreeScores(NamedTuple):
    """Of each of A probes and each of B trees, float64.

    Attributes:
        probe: distance or depth.
        spearman: (A, B) rank correlation of predicted and true values; NaN where one of them is constant.
        hits: (A, B) edges of the predicted tree that are right, or 1 if its root is.
        totals: (B,) edges of the tree that count, or 1.
        lengths: (B,) words.
    """

    probe: str
    spearman: Tensor
    hits: Tensor
    totals: Tensor
    lengths: Tensor

    @property
    def sentences(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def about(self) -> Row:
        """The probe, and numbers of sentences and targets, for the report."""
        words = int(self.lengths.sum())
        return {"probe": self.probe, "n_sentences": self.sentences, "n_targets": words}

    def measures(self, weights: Tensor) -> dict[str, Tensor]:
        """Each measure, (A, R), where a sentence counts as often as `weights` (R, B) say."""
        spearman = by_length(self.spearman, self.lengths, weights)
        hits = pooled_ratio(self.hits, self.totals, weights)
        if self.probe == "distance":
            return {"Spearman": spearman, "UUAS": hits}
        return {"Spearman": spearman, "root": hits}


def rank_correlations(predicted: Numbers, true: Numbers) -> Numbers:
    """Spearman's correlation along the last axis, NaN where one side is constant.

    Args:
        predicted: (..., n).
        true: (..., n), or broadcast to that.
    """
    a = _centred_ranks(predicted)
    b = _centred_ranks(true)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (a * b).sum(-1) / np.sqrt((a**2).sum(-1) * (b**2).sum(-1))


def _centred_ranks(values: Numbers) -> Numbers:
    ranks = rankdata(values, axis=-1)
    return ranks - ranks.mean(-1, keepdims=True)


def by_length(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Tensor:
    """Average over sentences of equal length, then over lengths of 5 to 50 words (Hewitt and Manning 2019, §4.1).

    Args:
        values: (A, B) of each sentence; NaN is no value.
        lengths: (B,) its words.
        weights: (R, B) how often each sentence counts; default: once.

    Returns:
        (A,), or (A, R) with weights; NaN if no sentence counts.
    """
    averaged = [n for n in lengths.unique().tolist() if n in LENGTHS]
    of_length = (lengths[:, None] == torch.tensor(averaged)).double()
    if weights is None:
        counted = torch.ones(1, len(lengths), dtype=torch.float64)
    else:
        counted = weights.double()

    known = values.isfinite().double()
    given = values.nan_to_num().double() * known
    sums = torch.einsum("rb,ab,bl->arl", counted, given, of_length)
    shares = torch.einsum("rb,ab,bl->arl", counted, known, of_length)
    means = (sums / shares).nanmean(-1)
    if weights is None:
        return means[:, 0]
    return means


def spanning_edges(predicted: Numbers, kept: NDArray[np.bool_]) -> set[Edge]:
    """The edges of the minimum spanning tree of distances between the words that are kept.

    Args:
        predicted: (n, n), of which the upper triangle counts; rounding may have left zeros a little below zero.
        kept: (n,).
    """
    words = kept.nonzero()[0]
    distances = predicted[np.ix_(words, words)]
    positive = distances - distances.min() + 1  # zero would be no edge at all
    spanning = minimum_spanning_tree(np.triu(positive, 1)).tocoo()
    edges = set()
    for row, column in zip(spanning.row, spanning.col, strict=True):
        edges.add(_edge(int(words[row]), int(words[column])))
    return edges


def punctuation(sentence: Sentence) -> NDArray[np.bool_]:
    """(n,) which words are punctuation, as far as parts of speech say so."""
    marks = np.zeros(len(sentence.words), dtype=bool)
    for target in sentence.targets:
        if target.task == "pos" and PUNCTUATION in target.labels:
            marks[target.span1[0]] = True
    return marks


def counted_edges(sentence: Sentence) -> set[Edge]:
    """The edges of a sentence's tree that UUAS counts: those between words other than punctuation."""
    marks = punctuation(sentence)
    return {(a, b) for a, b in tree_edges(sentence.heads) if not (marks[a] or marks[b])}


def predictions(bank: Bank, examples: Examples) -> Iterator[tuple[int, Numbers]]:
    """What structural probes predict of each tree.

    Yields:
        The number of the sentence, and (A, n, n) distances or (A, n) depths.
    """
    for part, predicted in answers(bank, examples):
        numbers = predicted.double().cpu().numpy()
        lengths = part.real.sum(1).tolist()
        for place, (sentence, n) in enumerate(
            zip(part.sentences, lengths, strict=True)
        ):
            own = numbers[:, place, :n]
            if own.ndim == 3:  # distances
                own = own[:, :, :n]
            yield sentence, own


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
    spearman, hits, totals, lengths = [], [], [], []
    for number, prediction in predicted:
        sentence = sentences[number]
        if probe == "distance":
            found = _score_distances(prediction, sentence, trees.distances[number])
        else:
            found = _score_depths(prediction, sentence, trees.depths[number])
        spearman.append(found[0])
        hits.append(found[1])
        totals.append(found[2])
        lengths.append(len(sentence.words))
    return TreeScores(
        probe,
        torch.from_numpy(np.stack(spearman, 1)),
        torch.tensor(hits, dtype=torch.float64).T,
        torch.tensor(totals, dtype=torch.float64),
        torch.tensor(lengths),
    )


Found = tuple[
    Numbers, list[int], int
]  # correlations and hits of A probes, and the total


def _score_distances(predicted: Numbers, sentence: Sentence, true: Tensor) -> Found:
    correlations = rank_correlations(predicted, true.double().numpy())
    with np.errstate(invalid="ignore"):  # a constant prediction has no correlation
        spearman = np.nansum(correlations, -1) / np.isfinite(correlations).sum(-1)

    edges = counted_edges(sentence)
    if not edges:
        return spearman, [0] * len(predicted), 0
    counted = ~punctuation(sentence)
    hits = [len(edges & spanning_edges(distances, counted)) for distances in predicted]
    return spearman, hits, len(edges)


def _score_depths(predicted: Numbers, sentence: Sentence, true: Tensor) -> Found:
    spearman = rank_correlations(predicted, true.double().numpy())
    counted = ~punctuation(sentence)
    if counted.any():
        predicted = np.where(counted, predicted, np.inf)
    right = predicted.argmin(-1) == sentence.heads.index(0)
    return spearman, right.tolist(), 1


def chain(trees: Trees, probe: str) -> Iterator[tuple[int, Numbers]]:
    """Predictions of a baseline that knows the order of the words alone: each hangs on the one before it."""
    for number, depths in trees.depths.items():
        place = np.arange(len(depths), dtype=float)
        if probe == "depth":
            yield number, place[None]
        else:
            yield number, np.abs(place[:, None] - place)[None]


def drawn_trees(
    bank: Bank, words: Words, count: int, model: str
) -> Iterator[dict[str, Any]]:
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
    chosen = [
        number
        for number, depths in trees.depths.items()
        if len(depths) in DRAWN_LENGTHS
    ]
    for number, predicted in predictions(bank, Examples(words, trees, chosen[:count])):
        sentence = words.sentences[number]
        yield {
            "model": model,
            "layer": bank.variants[0].layer,
            "words": sentence.text,
            "edges": _written(tree_edges(sentence.heads)),
            "counted": _written(counted_edges(sentence)),
            "found": _written(spanning_edges(predicted[0], ~punctuation(sentence))),
        }


def _written(edges: set[Edge]) -> str:
    return " ".join(f"{a}-{b}" for a, b in sorted(edges))
