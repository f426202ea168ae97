"""Trees as numbers: depths of words and distances between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Edge", "tree_depths", "tree_distances", "tree_edges"]

Edge = tuple[int, int]  # two words, the earlier one first, counted from 0


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
