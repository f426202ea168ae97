"""Structural probes of distance or depth: their bank, and what the report says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aligners.probing.bank import Bank, fresh_bank
from aligners.probing.tasks import Row, Task, pooled_ratio, score_columns
from aligners.probing.trees.asked import Trees
from aligners.probing.trees.probes import DepthProbes, DistanceProbes
from aligners.probing.trees.scores import TreeScores, by_length, chain, predictions, tree_scores
from aligners.probing.words import Words

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
        predicted = chain(trees, self.name) if bank is None else predictions(bank, held, trees)
        return tree_scores(self.name, predicted, held.sentences, trees)

    def columns(self, scores: Sequence[TreeScores], arm: int, weights: Tensor, banks: Sequence[Bank]) -> Row:
        """As `Task.columns`: Spearman's correlation, and the share of edges or roots that are found."""
        spearman = torch.stack([each.spearman[arm] for each in scores])
        lengths, asked = scores[0].lengths, scores[0].asked
        mean = spearman.mean(0, keepdim=True)
        own: Row = score_columns(
            "score", by_length(mean, lengths)[0], by_length(mean, lengths, weights)[0], by_length(spearman, lengths)
        )
        hits = torch.stack([each.hits[arm] for each in scores]).mean(0)
        name = "uuas" if self.name == "distance" else "root_accuracy"
        own |= score_columns(name, hits.sum() / asked.sum(), pooled_ratio(hits[None], asked, weights)[0])
        if banks:
            own["parameters"] = (self.arms[arm].rank or self._usual) * self.words.states.shape[-1]
        return own
