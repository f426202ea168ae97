"""The streams of paired rows that a comparison sums: the rows themselves and their controls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aligners.similarity.catalogue import ATTENTION, Family, Measure
from aligners.similarity.controls import cropped, permuted_rows
from datamodules.tokens.splits import Split


class Shape(NamedTuple):
    """Sizes of one model: layers whose states are read, their width, blocks whose attention is read, their heads."""

    layers: int
    width: int
    blocks: int = 0
    heads: int = 0


class Stream(NamedTuple):
    """One way to pair the rows of any two models.

    Attributes:
        name: value, null_0, null_1, ..., untrained, standardised or fit.
        measures: to be computed from it.
        groups: of texts that are told apart, for a jackknife along matching layers; 1: they are not.
        split: the texts that it reads.
        share: of a batch's texts by which the rows of Y are rolled to other texts; None: they are not.
    """

    name: str
    measures: tuple[Measure, ...]
    groups: int = 1
    split: Split = "test"
    share: float | None = None

    @property
    def families(self) -> set[Family]:
        """What its measures are computed from."""
        return {measure.family for measure in self.measures}

    @property
    def budgets(self) -> list[int]:
        """Sizes of the samples of rows that its measures need."""
        return sorted({measure.budget for measure in self.measures if measure.family == "rows"})

    @property
    def sides(self) -> tuple[str, str]:
        """By which names a model's rows go as X and as Y: the same, unless a model has other rows in each place."""
        return ("", "") if self.share is None else ("x", "y")

    def covers(self, pair: tuple[int, int]) -> bool:
        """Whether it has this pair of models: a model with itself has no controls."""
        return self.name == "value" or pair[0] != pair[1]

    def groups_of(self, pair: tuple[int, int]) -> int:
        """Groups that are told apart for this pair."""
        return self.groups if pair[0] != pair[1] else 1


def streams_of(measures: Sequence[Measure], controls: bool, groups: int, permutations: int) -> list[Stream]:
    """All streams of a comparison, those of the fitting texts first."""
    every = tuple(measures)
    value = Stream("value", every, groups if controls else 1)
    if not controls:
        return [value]
    on_states = tuple(measure for measure in measures if measure.family not in ATTENTION)
    fitted = tuple(measure for measure in measures if measure.held_out is not None)
    shares = [(roll + 1) / (permutations + 1) for roll in range(permutations)]
    return [
        Stream("fit", fitted, split="fit"),
        value,
        *(Stream(f"null_{roll}", every, share=share) for roll, share in enumerate(shares)),
        Stream("untrained", every),
        Stream("standardised", on_states),
    ]


class Rows(NamedTuple):
    """The rows of one batch of one stream, of each model made when they are asked for.

    Attributes:
        text: (N,) number of the text of each row; token: (N,) place of the row in its text.
        states: from a model's number and the name of its side to (L, N, d), of the layers that are read.
        weights: likewise to attention between words, (L, H, B, W, W); not asked for without words.
        words: (B,) words of each text, of those that have any; none without attention.
    """

    text: Tensor
    token: Tensor
    states: Callable[[int, str], Tensor]
    weights: Callable[[int, str], Tensor]
    words: Tensor

    def rolled(self, share: float) -> Rows:
        """Rows and attention of X paired with those of other texts of Y: the null of every measure.

        Args:
            share: see `aligners.similarity.controls.permuted_rows`.

        Raises:
            ValueError: as there.
        """
        index, words = dict(zip("xy", permuted_rows(self.text, share), strict=True)), self.words
        if len(words) < 2:
            words = words[:0]
        shift = min(max(round(share * len(words)), 1), len(words) - 1)
        both = torch.minimum(words, words.roll(shift))

        def states(m: int, side: str) -> Tensor:
            return self.states(m, side)[:, index[side]]

        def weights(m: int, side: str) -> Tensor:
            found = self.weights(m, side)
            return cropped(found if side == "x" else found.roll(shift, 2), both)

        return Rows(self.text[index["x"]], self.token[index["x"]], states, weights, both)
