"""What a structural probe is asked: the tree of each sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aligners.probing.trees.shapes import tree_depths, tree_distances
from aligners.probing.words import Words, numbers_within, relative
from datamodules.text.annotated.sentence import check_tree

__all__ = ["LEAST", "Trees", "TreesPart"]

LEAST = 2  # words of a tree: one word has no distances


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
        heads = {b: each.heads for b, each in enumerate(words.sentences) if len(each.heads) >= LEAST}
        if not heads:
            raise ValueError(
                f"Expected sentences with trees for structural probes, but none of {len(words.sentences)} has one: all "
                "heads are missing. Leave distance and depth out of `tasks`, or give a treebank."
            )
        for own in heads.values():
            check_tree(own)
        return cls(
            {b: tree_depths(own).float() for b, own in heads.items()},
            {b: tree_distances(own).float() for b, own in heads.items()},
        )

    @property
    def sentences(self) -> list[int]:
        """Numbers of the sentences that have a tree."""
        return list(self.depths)

    def part(self, words: Words, sentences: Sequence[int]) -> TreesPart:
        """The trees of some sentences, whose rows are counted from 0, on the device of the states."""
        chosen, device = list(sentences), words.states.device
        shift = relative(words.first, chosen)
        rows = [numbers_within(words.first, [b]) + shift[b] for b in chosen]
        depths = pad_sequence([self.depths[b] for b in chosen], batch_first=True)
        lengths = torch.tensor([len(own) for own in rows])
        distances = torch.zeros(*depths.shape, depths.shape[1])
        for place, b in enumerate(chosen):
            distances[place, : lengths[place], : lengths[place]] = self.distances[b]
        real = torch.arange(depths.shape[1]) < lengths[:, None]
        padded = pad_sequence(rows, batch_first=True)
        return TreesPart(padded.to(device), real.to(device), depths.to(device), distances.to(device), chosen)
