"""The words of two models at the site pairs of their maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from aligners.probing.words import Place, Words, WordsBeingRead
from datamodules.layers import LayerBatch
from datamodules.rows.reading import PairedBatch
from datamodules.text.annotated.sentence import Sentence

__all__ = ["PairedWords", "PairsBeingRead"]

AT_ONCE = 8192  # rows that are mapped together


class PairedWords(NamedTuple):
    """The same words as two models have them.

    Attributes:
        x: the words with X's states, at each of its sites once.
        y: with Y's.
        pairs: S site pairs (i, j).
    """

    x: Words
    y: Words
    pairs: Sequence[tuple[int, int]]

    def mapped(self, map_rows: Callable[[Tensor], Tensor]) -> list[Words]:
        """What a map makes of X's words, as words of Y: for each site pair words with states at Y's site.

        Args:
            map_rows: (S, N, d_x) -> (S, N, d_y).
        """
        x = self.x.states[[self.x.places.index(Place("model", i)) for i, _ in self.pairs]]
        with torch.no_grad():
            found = torch.cat([map_rows(rows) for rows in x.split(AT_ONCE, 1)], 1)
        return [
            replace(self.y, states=found[s : s + 1], places=(Place("model", j),)) for s, (_, j) in enumerate(self.pairs)
        ]


class PairsBeingRead:
    """Collects batches of paired words.

    Args:
        sentences: of the split, by the numbers of its texts.
        pairs: the site pairs of the batches.
    """

    def __init__(self, sentences: Sequence[Sentence], pairs: Sequence[tuple[int, int]]) -> None:
        sides = list(zip(*pairs, strict=True))
        self.pairs = pairs
        self._chosen = [[side.index(layer) for layer in dict.fromkeys(side)] for side in sides]
        self._reading = [
            WordsBeingRead(sentences, tuple(Place("model", layer) for layer in dict.fromkeys(side))) for side in sides
        ]

    def add(self, batch: PairedBatch) -> None:
        """Add the sentences of a batch that both models read whole."""
        rows = LayerBatch(batch.texts, (batch.rows,), [])
        for reading, states, chosen in zip(self._reading, (batch.x, batch.y), self._chosen, strict=True):
            reading.add(rows, states[chosen])

    def whole(self) -> PairedWords:
        """All of them, in the order of the texts.

        Raises:
            ValueError: no sentence is read whole.
        """
        x, y = (reading.whole() for reading in self._reading)
        return PairedWords(x, y, self.pairs)
