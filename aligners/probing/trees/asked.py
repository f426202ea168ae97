"""Trees as numbers: depths of words and distances between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aligners.errors import UserError
from aligners.probing.words import Words
from datamodules.text.annotated.sentence import check_tree

LEAST = 2  # words of a tree: one word has no distances
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
        heads = {b: each.heads for b, each in enumerate(words.sentences) if len(each.heads) >= LEAST}
        if not heads:
            raise UserError(
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
        depths = pad_sequence([self.depths[b] for b in chosen], batch_first=True)
        columns, lengths = torch.arange(depths.shape[1]), words.first.diff()[chosen]
        real = columns < lengths[:, None]
        rows = (words.starts(chosen)[:, None] + columns).where(real, 0)
        distances = torch.zeros(*depths.shape, depths.shape[1])
        for place, (b, n) in enumerate(zip(chosen, lengths.tolist(), strict=True)):
            distances[place, :n, :n] = self.distances[b]
        return TreesPart(rows.to(device), real.to(device), depths.to(device), distances.to(device), chosen)


def tree_depths(heads: Sequence[int]) -> Tensor:
    """Depth of each word, (n,) int64, 0 for the root.

    Args:
        heads: of each word the number of its head, counted from 1; 0 for the root. They make a tree.
    """
    return _ancestors(heads).sum(1) - 1


def tree_distances(heads: Sequence[int]) -> Tensor:
    """Number of edges between two words, (n, n) int64.

    The path between two words leads through their lowest common ancestor, whose depth is the number of ancestors that
    they share, less one, where each word counts as its own.

    Args:
        heads: as in `tree_depths`.
    """
    above = _ancestors(heads)
    depths = above.sum(1)
    return depths[:, None] + depths - 2 * above @ above.T


def tree_edges(heads: Sequence[int]) -> set[Edge]:
    """The edges of a tree, the root's own none of them."""
    pairs = ((word, head - 1) for word, head in enumerate(heads) if head)
    return {(min(pair), max(pair)) for pair in pairs}


def _ancestors(heads: Sequence[int]) -> Tensor:
    """(n, n) int64: 1 where the second word is the first, or an ancestor of it."""
    above = torch.zeros(len(heads), len(heads), dtype=torch.int64)
    for word in range(len(heads)):
        at = word
        while at >= 0:
            above[word, at] = 1
            at = heads[at] - 1
    return above
