"""Words of annotated sentences with the states that models have of them, kept in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from aligners.errors import UserError
from datamodules.text.annotated.sentence import Sentence

Source = Literal["model", "untrained"]


class Place(NamedTuple):
    """Where states were read.

    Attributes:
        source: the model, or its untrained twin.
        layer: its number.
    """

    source: Source
    layer: int


@dataclass(frozen=True)
class Words:
    """B sentences with a row of states for each of their N words.

    Attributes:
        states: (L, N, d) float32.
        places: where each of the L was read.
        sentences: in the order of their rows.
        first: (B + 1,) on the CPU: the row of each sentence's first word; the last entry is N.
        cut: sentences that were left out, because the model does not read all of their words.
    """

    states: Tensor
    places: tuple[Place, ...]
    sentences: Sequence[Sentence]
    first: Tensor
    cut: int = 0

    def rows(self, sentences: Sequence[int]) -> Tensor:
        """The rows of some sentences, one after the other, on the CPU."""
        return numbers_within(self.first, sentences)

    def starts(self, sentences: Sequence[int]) -> Tensor:
        """The place of the first word of each of some sentences among the `rows` of these, (b,)."""
        lengths = self.first.diff()[list(sentences)]
        return lengths.cumsum(0) - lengths

    def read(self, places: Sequence[Place], sentences: Sequence[int]) -> Tensor:
        """The states of some sentences at some places: (L', n, d).

        Raises:
            ValueError: nothing was read at a place.
        """
        missing = [place for place in places if place not in self.places]
        if missing:
            raise UserError(
                f"Expected states that were read at layer {missing[0].layer} of the {missing[0].source}, but got "
                f"{len(self.places)} other places."
            )
        where = torch.tensor([self.places.index(place) for place in places])
        rows, device = self.rows(sentences), self.states.device
        return self.states[where[:, None].to(device), rows.to(device)]


def numbers_within(first: Tensor, chosen: Sequence[int]) -> Tensor:
    """The numbers first[c], ..., first[c + 1] - 1 of each c that is chosen, one after the other."""
    wanted = torch.as_tensor(chosen, dtype=torch.int64)
    lengths = first[wanted + 1] - first[wanted]
    ends = lengths.cumsum(0)
    return torch.arange(int(ends[-1])) + (first[wanted] - ends + lengths).repeat_interleave(lengths)


@dataclass
class WordsBeingRead:
    """Collects batches.

    Attributes:
        sentences: of the split, by the numbers of its texts.
        places: where states are read.
    """

    sentences: Sequence[Sentence]
    places: tuple[Place, ...]
    _parts: list[tuple[int, Tensor]] = field(default_factory=list)
    _cut: list[int] = field(default_factory=list)

    def add(self, numbers: Sequence[int], counts: Sequence[int], states: Tensor) -> None:
        """Add the sentences of a batch that were read whole.

        Args:
            numbers: of its texts.
            counts: rows of each, which are words.
            states: (L, n, d) of its rows.
        """
        for number, part in zip(numbers, states.split(counts, 1), strict=True):
            if part.shape[1] == len(self.sentences[number].words):
                self._parts.append((number, part.float()))
            else:
                self._cut.append(number)

    def whole(self, *, drop: bool = True) -> Words:
        """All of them, in the order of the texts, however they were batched.

        Args:
            drop: whether sentences that the model does not read whole may be left out.

        Raises:
            ValueError: no sentence was read whole, or one was not that must be.
        """
        if self._cut and not drop:
            begins = " ".join(self.sentences[self._cut[0]].words[:5])
            raise UserError(
                f"Expected sentences that every model reads whole, but {len(self._cut)} are not, such as {begins!r}. "
                "Raise `data.max_length`, or leave them out with `long_sentences` drop."
            )
        if not self._parts:
            raise UserError(
                f"Expected sentences that every model reads whole, but none of {len(self._cut)} is. Raise "
                "`data.max_length`, or give shorter sentences."
            )
        parts = sorted(self._parts, key=lambda part: part[0])
        lengths = torch.tensor([0, *(part.shape[1] for _, part in parts)])
        states = torch.cat([part for _, part in parts], 1)
        self._parts = []
        kept = [self.sentences[number] for number, _ in parts]
        return Words(states, self.places, kept, lengths.cumsum(0), len(self._cut))
