"""Structural probes of distance or depth: their bank, and what the report says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from aligners.probing.arms import Arm
from aligners.probing.bank import Bank, Examples, fresh_bank
from aligners.probing.rows import Row, draws, pooled_ratio, row_of, score_columns
from aligners.probing.training import ProbeTraining, train_bank
from aligners.probing.trees.asked import Trees
from aligners.probing.trees.probes import DepthProbes, DistanceProbes
from aligners.probing.trees.scores import (
    Numbers,
    TreeScores,
    by_length,
    chain,
    depth_scores,
    distance_scores,
    predictions,
)
from aligners.probing.words import Words

__all__ = ["STRUCTURAL", "TreeTask"]

STRUCTURAL = ("distance", "depth")
USUAL_RANK = 64  # more adds nothing (Hewitt and Manning 2019, §4.2 and Figure 5), and takes longer


@dataclass
class TreeTask:
    """Distances or depths in the trees of a model's fitting words.

    Args:
        name: which of them.
        words: the fitting words.
        watched: the validation words.
        arms: of the bank; without a rank: that of 64, or the width of narrower states.
        seed: of the intervals.
    """

    name: Literal["distance", "depth"]
    words: Words
    watched: Words
    arms: Sequence[Arm]
    seed: int
    trees: Trees = field(init=False)

    def __post_init__(self) -> None:
        self.trees = Trees.of(self.words)

    def train(self, how: ProbeTraining, seed: int) -> Bank:
        """Train a fresh bank on all fitting words."""
        kind = DistanceProbes if self.name == "distance" else DepthProbes
        bank = fresh_bank(kind, self.arms, self.words, seed, usual=self._usual)
        watched = Examples(self.watched, Trees.of(self.watched))
        train_bank(bank, Examples(self.words, self.trees), watched, how, seed)
        return bank

    @property
    def _usual(self) -> int:
        return min(USUAL_RANK, self.words.states.shape[-1])

    def about(self) -> dict[str, Any]:
        """What is kept beside a bank, as plain values."""
        return {"task": self.name}

    def rows(self, banks: Sequence[Bank], held: Words) -> Iterator[Row]:
        """Rows of the report: one for each arm, and one of a chain of the words in their order.

        Args:
            banks: one of each seed.
            held: held-out words.
        """
        trees = Trees.of(held)
        least = self.scores(chain(trees, self.name == "depth"), held, trees)
        found = [self.scores(predictions(bank, held, trees), held, trees) for bank in banks]
        weights = draws(len(trees.sentences), self.seed)
        about: dict[str, Any] = {
            "task": self.name,
            "probe": self.name,
            "n_sentences": len(trees.sentences),
            "n_targets": sum(len(own) for own in trees.depths.values()),
        }
        yield row_of("word order", None, **about, **self._scored([least], 0, weights))
        for a, arm in enumerate(self.arms):
            size = (arm.rank or self._usual) * self.words.states.shape[-1]
            yield row_of(arm.source, arm, **about, **self._scored(found, a, weights), parameters=size)

    def scores(self, found: Iterator[tuple[int, Numbers]], held: Words, trees: Trees) -> TreeScores:
        """Score predictions about held-out words."""
        score = distance_scores if self.name == "distance" else depth_scores
        return score(found, held.sentences, trees)

    def _scored(self, found: Sequence[TreeScores], a: int, weights: Tensor) -> dict[str, Tensor]:
        """Spearman's correlation, and the share of edges or roots that are found, of an arm over all seeds."""
        spearman = torch.stack([each.spearman[a] for each in found])
        lengths, asked = found[0].lengths, found[0].asked
        mean = spearman.mean(0, keepdim=True)
        own = score_columns(
            "score", by_length(mean, lengths)[0], by_length(mean, lengths, weights)[0], by_length(spearman, lengths)
        )
        hits = torch.stack([each.hits[a] for each in found]).mean(0)
        name = "uuas" if self.name == "distance" else "root_accuracy"
        return {**own, **score_columns(name, hits.sum() / asked.sum(), pooled_ratio(hits[None], asked, weights)[0])}
