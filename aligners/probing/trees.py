"""Trees of sentences, and how well predicted distances or depths agree with them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.csgraph import minimum_spanning_tree, shortest_path
from scipy.stats import rankdata
from torch import Tensor

from aligners.datamodules.text.annotated.sentence import Sentence, check_tree
from aligners.errors import UserError
from aligners.probing.probe_bank import Bank, Examples, Words, answers
from aligners.probing.probing_tasks import Row, pooled_ratio

LEAST = 2  # fewest words of a tree: one word has no distances
DRAWN_LENGTHS = range(
    7, 14
)  # words of a drawn sentence: enough to be of interest, and few enough for a page
LENGTHS = range(5, 51)  # words of sentences over which correlations are averaged
PUNCTUATION = "PUNCT"  # universal part of speech

Edge = tuple[int, int]  # two words, the earlier one first, counted from 0
Numbers = NDArray[np.float64]
Marks = NDArray[np.bool_]
Predicted = Iterable[tuple[int, Numbers]]  # the number of a sentence, and A predictions


class TreesPart(NamedTuple):
    """Trees of b sentences of up to T words, padded.

    Attributes:
        rows: (b, T) the row of each word; 0 where there is none.
        real: (b, T) True where there is a word.
        depths: (b, T).
        distances: (b, T, T).
        sentences: numbers of the sentences.
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
        """Build the trees of all sentences that have one, of two words or more.

        Raises:
            ValueError: no sentence has a tree, or heads make no tree.
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

    def _padded(self, numbers: Sequence[int], lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the depths (B, W) and distances (B, W, W) of trees of so many words (B,), zero beyond their ends."""
        longest = int(lengths.max())
        depths = torch.zeros(len(numbers), longest)
        distances = torch.zeros(len(numbers), longest, longest)
        for place, number in enumerate(numbers):
            n = int(lengths[place])
            depths[place, :n] = self.depths[number]
            distances[place, :n, :n] = self.distances[number]
        return depths, distances

    def part(self, words: Words, sentences: Sequence[int]) -> TreesPart:
        """Return the trees of some sentences, whose rows are counted from 0, on the device of the states."""
        chosen = list(sentences)
        lengths = words.first.diff()[chosen]
        columns = torch.arange(int(lengths.max()))
        real = columns < lengths[:, None]
        rows = words.starts(chosen)[:, None] + columns

        depths, distances = self._padded(chosen, lengths)

        device = words.states.device
        return TreesPart(
            rows=rows.where(real, 0).to(device),
            real=real.to(device),
            depths=depths.to(device),
            distances=distances.to(device),
            sentences=chosen,
        )


def tree_distances(heads: Sequence[int]) -> Tensor:
    """Return the number of edges between every two words, (n, n) float32.

    Args:
        heads: for each word the number of its head, counted from 1; 0 for the root. They must make a tree.
    """
    words = len(heads)
    edges = np.zeros((words, words))
    for pair in tree_edges(heads):
        edges[pair] = 1
    distances = shortest_path(edges, directed=False)
    return torch.from_numpy(distances).float()


def tree_edges(heads: Sequence[int]) -> set[Edge]:
    """Return the edges of a tree, without the root's own."""
    edges = set()
    for word, head in enumerate(heads):
        if head:
            edges.add(_edge(word, head - 1))
    return edges


def _edge(a: int, b: int) -> Edge:
    return min(a, b), max(a, b)


class TreeScores(NamedTuple):
    """How well each of A probes predicts each of B trees, float64.

    Attributes:
        probe: distance or depth.
        spearman: (A, B) rank correlation of predicted and true values; NaN where one of them is constant.
        hits: (A, B) edges of the predicted tree that are right, or 1 if its root is.
        totals: (B,) edges of the tree that count, or 1.
        lengths: (B,) numbers of words.
    """

    probe: str
    spearman: Tensor
    hits: Tensor
    totals: Tensor
    lengths: Tensor

    @property
    def sentences(self) -> int:
        """B, the number of sentences."""
        return len(self.lengths)

    @property
    def about(self) -> Row:
        """What the report says: the measures, and the numbers of sentences and targets."""
        return {
            "probe": self.probe,
            "n_sentences": self.sentences,
            "n_targets": int(self.lengths.sum()),
        }

    def measures(self, weights: Tensor) -> dict[str, Tensor]:
        """Return each measure, (A, R), where each sentence counts as often as `weights` (R, B) say."""
        spearman = by_length(self.spearman, self.lengths, weights)
        hits = pooled_ratio(self.hits, self.totals, weights)
        if self.probe == "distance":
            return {"Spearman": spearman, "UUAS": hits}
        return {"Spearman": spearman, "root": hits}


def rank_correlations(predicted: Numbers, true: Numbers) -> Numbers:
    """Return Spearman's correlation along the last axis, NaN where one side is constant.

    Args:
        predicted: (..., n).
        true: (..., n), or broadcast to that.
    """
    a = _centred_ranks(predicted)
    b = _centred_ranks(true)
    covariance = (a * b).sum(-1)
    variances = (a**2).sum(-1) * (b**2).sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return covariance / np.sqrt(variances)


def _centred_ranks(values: Numbers) -> Numbers:
    ranks = rankdata(values, axis=-1)
    return ranks - ranks.mean(-1, keepdims=True)


def by_length(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Tensor:
    """Average over sentences of equal length, then over lengths of 5 to 50 words (Hewitt and Manning 2019, §4.1).

    Args:
        values: (A, B) value of each sentence; NaN if it has none.
        lengths: (B,) number of its words.
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


def spanning_edges(predicted: Numbers, kept: Marks) -> set[Edge]:
    """Return the edges of the minimum spanning tree of the distances between the words that are kept.

    Args:
        predicted: (n, n) distances, of which the upper triangle is used; rounding may make zeros slightly negative.
        kept: (n,).
    """
    words = kept.nonzero()[0]
    distances = predicted[np.ix_(words, words)]
    positive = distances - distances.min() + 1  # zero would mean that there is no edge
    upper = np.triu(positive, 1)
    spanning = minimum_spanning_tree(upper).tocoo()
    ends = words[spanning.row].tolist(), words[spanning.col].tolist()
    return set(map(_edge, *ends))


def punctuation(sentence: Sentence) -> Marks:
    """Return which words are punctuation, (n,), as far as parts of speech tell."""
    words = len(sentence.words)
    marks = np.zeros(words, dtype=bool)
    for target in sentence.targets:
        if target.task == "pos" and PUNCTUATION in target.labels:
            marks[target.span1[0]] = True
    return marks


def counted_edges(sentence: Sentence) -> set[Edge]:
    """Return the edges of a sentence's tree that UUAS counts: those between words other than punctuation."""
    marks = punctuation(sentence)
    edges = tree_edges(sentence.heads)
    return {(a, b) for a, b in edges if not (marks[a] or marks[b])}


def predictions(bank: Bank, examples: Examples) -> Predicted:
    """Yield the predictions of structural probes for each tree.

    Yields:
        The number of the sentence, and (A, n, n) distances or (A, n) depths.
    """
    for part, predicted in answers(bank, examples):
        numbers = predicted.double().cpu().numpy()
        lengths = part.real.sum(1).tolist()
        for place, sentence in enumerate(part.sentences):
            n = lengths[place]
            own = numbers[:, place, :n]
            if own.ndim == 3:  # distances
                own = own[:, :, :n]
            yield sentence, own


def tree_scores(
    probe: str, predicted: Predicted, sentences: Sequence[Sentence], trees: Trees
) -> TreeScores:
    """Compute rank correlations, and compare the edges of the spanning tree, or the word of least depth.

    The correlation of the distances from a word is averaged over all words, punctuation included. Edges of punctuation
    do not count, as in the paper, and punctuation is never taken for the root.

    Args:
        probe: distance or depth.
        predicted: (A, n, n) distances or (A, n) depths of each tree.
        sentences: all sentences, by number.
        trees: the true trees.
    """
    spearman, hits, totals, lengths = [], [], [], []
    for number, prediction in predicted:
        sentence = sentences[number]
        if probe == "distance":
            distances = trees.distances[number].double().numpy()
            spearman.append(_distance_correlations(prediction, distances))
            found, total = _edge_hits(prediction, sentence)
        else:
            depths = trees.depths[number].double().numpy()
            spearman.append(rank_correlations(prediction, depths))
            found, total = _root_hits(prediction, sentence), 1
        hits.append(found)
        totals.append(total)
        lengths.append(len(sentence.words))
    return TreeScores(
        probe,
        torch.from_numpy(np.stack(spearman, 1)),
        torch.tensor(hits, dtype=torch.float64).T,
        torch.tensor(totals, dtype=torch.float64),
        torch.tensor(lengths),
    )


def _distance_correlations(predicted: Numbers, true: Numbers) -> Numbers:
    """Return the rank correlation of the distances from each word, mean over words: (A, n, n), (n, n) -> (A,)."""
    correlations = rank_correlations(predicted, true)
    known = np.isfinite(correlations).sum(-1)
    with np.errstate(invalid="ignore"):  # a constant prediction has no correlation
        return np.nansum(correlations, -1) / known


def _edge_hits(predicted: Numbers, sentence: Sentence) -> tuple[list[int], int]:
    """Return how many edges of the tree each of A predictions finds, and how many there are."""
    edges = counted_edges(sentence)
    if not edges:
        return [0] * len(predicted), 0
    kept = ~punctuation(sentence)
    hits = []
    for distances in predicted:
        found = spanning_edges(distances, kept)
        hits.append(len(edges & found))
    return hits, len(edges)


def _root_hits(predicted: Numbers, sentence: Sentence) -> list[int]:
    """Return whether each of A predictions finds the root."""
    kept = ~punctuation(sentence)
    if kept.any():
        predicted = np.where(kept, predicted, np.inf)
    right = predicted.argmin(-1) == sentence.heads.index(0)
    return right.tolist()


def chain(trees: Trees, probe: str) -> Predicted:
    """Yield predictions of a baseline that only knows the words' order: each word depends on the one before it."""
    for number, depths in trees.depths.items():
        place = np.arange(len(depths), dtype=float)
        if probe == "depth":
            yield number, place[None]
        else:
            distances = np.abs(place[:, None] - place)
            yield number, distances[None]


def drawn_trees(bank: Bank, words: Words, count: int, model: str) -> Iterator[Row]:
    """Yield the first sentences of suitable length, with the edges of their trees and those that a probe finds.

    Args:
        bank: a bank of one distance probe.
        words: held-out words.
        count: number of sentences.
        model: name of the model.

    Yields:
        Rows with the words, and edges as `0-1 1-3`; `counted` holds the edges of the tree that UUAS counts.
    """
    trees = Trees.of(words)
    chosen = []
    for number, depths in trees.depths.items():
        if len(depths) in DRAWN_LENGTHS:
            chosen.append(number)

    drawn = Examples(words, trees, chosen[:count])
    for number, predicted in predictions(bank, drawn):
        sentence = words.sentences[number]
        found = spanning_edges(predicted[0], ~punctuation(sentence))
        yield {
            "model": model,
            "layer": bank.variants[0].layer,
            "words": sentence.text,
            "edges": _written(tree_edges(sentence.heads)),
            "counted": _written(counted_edges(sentence)),
            "found": _written(found),
        }


def _written(edges: set[Edge]) -> str:
    return " ".join(f"{a}-{b}" for a, b in sorted(edges))
