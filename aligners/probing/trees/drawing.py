"""Which trees are drawn, and how probes see them."""

from __future__ import annotations

from typing import Any

from aligners.probing.bank import Bank
from aligners.probing.trees.asked import Trees
from aligners.probing.trees.scores import counted_edges, predictions, punctuation, spanning_edges
from aligners.probing.trees.shapes import Edge, tree_edges
from aligners.probing.words import Words

__all__ = ["drawn_trees"]

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
