"""Structural probes: whether a linear map of the states lays out a sentence's tree, by distances or depths."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aligners.errors import UserError
from aligners.probing.bank import Arm, Bank, Examples, Probes, Words, fresh_bank
from aligners.probing.tasks import Row, Task, pooled_ratio, score_columns
from aligners.probing.trees import Trees, TreeScores, TreesPart, by_length, chain, predictions, tree_scores

START, WIDTH = 0.05, 64  # entries of a B of 64 x 64 are drawn from -START..START, as in the paper's code


class StructuralProbes(Probes):
    """Maps h ↦ Bᵀh, which differ in the states that they read and in rank.

    Args:
        arms: with the rank of each.
        width: d, of the states.
        most: the highest rank; default: of these arms.
        usual: rank of the arms that name none; default: d.

    Raises:
        ValueError: a rank is not between 1 and d.

    References:
        Hewitt and Manning 2019, "A structural probe for finding syntax in word representations", NAACL.
    """

    kept: Tensor

    def __init__(self, arms: Sequence[Arm], width: int, most: int | None = None, usual: int | None = None) -> None:
        super().__init__(arms, width)
        self.usual = width if usual is None else usual
        ranks = [self.usual if arm.rank is None else arm.rank for arm in arms]
        wrong = [rank for rank in ranks if not 1 <= rank <= width]
        if wrong:
            raise UserError(f"Expected `ranks` between 1 and {width}, the width of the states, but got {wrong[0]}.")
        self.most = max(ranks) if most is None else most
        start = torch.empty(width, width).uniform_(-START, START)[:, : self.most]
        size = torch.tensor([WIDTH / math.sqrt(width * rank) for rank in ranks])  # that of |Bᵀh|² is then that of trees
        self.weight = nn.Parameter(start * size[:, None, None])
        self.register_buffer("kept", torch.arange(self.most) < torch.tensor(ranks)[:, None], persistent=False)

    def projected(self, read: Tensor, part: TreesPart) -> Tensor:
        """Bᵀh of the words of each sentence, padded: (A, n, d) -> (A, b, T, most), zero beyond an arm's rank."""
        return torch.bmm(read, self.weight * self.kept[:, None])[:, part.rows]


class DistanceProbes(StructuralProbes):
    """The squared distance |Bᵀ(h_i − h_j)|² stands for the distance of two words in the tree (§2.2)."""

    def forward(self, read: Tensor, part: TreesPart) -> Tensor:
        """Predict distances: (A, n, d) -> (A, b, T, T)."""
        projected = self.projected(read, part)
        squares = projected.square().sum(-1)
        return squares[..., :, None] + squares[..., None, :] - 2 * projected @ projected.mT

    def losses(self, read: Tensor, part: TreesPart) -> Tensor:
        """Mean absolute error over all pairs of words of each sentence (eq. 3), (A, b)."""
        pairs = (part.real[:, :, None] & part.real[:, None]).to(read.dtype)
        errors = (self(read, part) - part.distances).abs() * pairs
        return errors.sum((-1, -2)) / pairs.sum((-1, -2))


class DepthProbes(StructuralProbes):
    """The squared length |Bᵀh_i|² stands for the depth of a word in the tree (§2.3): of h itself, not of h − mean."""

    centred = False

    def forward(self, read: Tensor, part: TreesPart) -> Tensor:
        """Predict depths: (A, n, d) -> (A, b, T)."""
        return self.projected(read, part).square().sum(-1)

    def losses(self, read: Tensor, part: TreesPart) -> Tensor:
        """Mean absolute error over the words of each sentence, (A, b)."""
        real = part.real.to(read.dtype)
        errors = (self(read, part) - part.depths).abs() * real
        return errors.sum(-1) / real.sum(-1)


STRUCTURAL = {"distance": DistanceProbes, "depth": DepthProbes}


USUAL_RANK = 64  # more adds nothing (Hewitt and Manning 2019, §4.2 and Figure 5), and takes longer


@dataclass
class TreeTask(Task):
    """Distances or depths in the trees of a model's fitting words, as its name says.

    An arm without a rank has that of 64, or the width of narrower states.
    """

    baseline = "word order"

    def annotations(self, words: Words) -> Trees:
        """The trees of words."""
        return Trees.of(words)

    @property
    def _usual(self) -> int:
        return min(USUAL_RANK, self.words.states.shape[-1])

    def fresh(self, seed: int) -> Bank:
        """Make an untrained bank."""
        return fresh_bank(STRUCTURAL[self.name], self.arms, self.words, seed, usual=self._usual)

    def scores(self, bank: Bank | None, held: Words) -> TreeScores:
        """As `Task.scores`; the baseline is a chain of the words in their order."""
        trees = Trees.of(held)
        predicted = chain(trees, self.name) if bank is None else predictions(bank, Examples(held, trees))
        return tree_scores(self.name, predicted, held.sentences, trees)

    def columns(self, scores: Sequence[TreeScores], arm: int, weights: Tensor) -> Row:
        """Spearman's correlation, and the share of edges or roots that are found: means over seeds."""
        spearman = torch.stack([result.spearman[arm] for result in scores])
        lengths, totals = scores[0].lengths, scores[0].asked
        mean = spearman.mean(0, keepdim=True)
        hits = torch.stack([result.hits[arm] for result in scores]).mean(0)
        name = "uuas" if self.name == "distance" else "root_accuracy"
        share = score_columns(name, pooled_ratio(hits[None], totals, weights)[0])
        return {**score_columns("score", by_length(mean, lengths, weights)[0], by_length(spearman, lengths)), **share}

    def of_probe(self, scores: Sequence[TreeScores], arm: int, weights: Tensor) -> Row:
        """Parameters."""
        return {"parameters": (self.arms[arm].rank or self._usual) * self.words.states.shape[-1]}
