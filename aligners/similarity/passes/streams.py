"""The streams of paired rows that a comparison sums: the rows as they are, and those of its controls."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from aligners.datamodules.tokens.splits import Split
from aligners.similarity.catalogue import ATTENTION, Family, Measure
from aligners.similarity.controls import cropped, permuted_rows, rolled_by

# by `data.far_rows`, the stream that stands beside the value
FAR_VALUES = {"leave_out": "with_far", "keep": "without_far"}


class Shape(NamedTuple):
    """Sizes of one model: layers whose states are read, their width, blocks whose attention is read, their heads."""

    layers: int
    width: int
    blocks: int = 0
    heads: int = 0


class Stream(NamedTuple):
    """One way to pair the rows of any two models.

    Attributes:
        name: value, null_0, null_1, ..., untrained, standardised, fit, with_far or without_far.
        measures: to be computed from it.
        groups: groups of texts that are told apart, for a jackknife along matching layers; 1: they are not.
        split: the texts that it reads.
        share: share of a batch's texts by which the rows of Y are rolled to other texts; None: they are not.
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
        budgets = {each.budget for each in self.measures if each.family == "rows"}
        return sorted(budgets)

    @property
    def sides(self) -> tuple[str, str]:
        """Names of a model's rows as X and as Y: the same, unless a model has other rows in each place."""
        if self.share is None:
            return "x", "x"
        return "x", "y"

    def covers(self, pair: tuple[int, int]) -> bool:
        """Whether it has this pair of models: a model with itself has no controls."""
        x, y = pair
        return x != y or self.name in ("value", *FAR_VALUES.values())

    def groups_of(self, pair: tuple[int, int]) -> int:
        """Groups that are told apart for this pair."""
        x, y = pair
        if x == y:
            return 1
        return self.groups


def streams_of(
    measures: Sequence[Measure],
    controls: bool,
    groups: int,
    permutations: int,
    beside: str | None = None,
) -> list[Stream]:
    """All streams of a comparison, those of the fitting texts first.

    Args:
        measures: to be computed.
        controls: whether there are controls.
        groups: groups of texts that are told apart.
        permutations: of the null.
        beside: with_far or without_far, the rows that stand beside those that count; None: there are none.
    """
    every = tuple(measures)
    on_states = tuple(each for each in measures if each.family not in ATTENTION)
    fitted = tuple(each for each in measures if each.held_out is not None)
    if controls:
        streams = [Stream("fit", fitted, split="fit"), Stream("value", every, groups)]
        for roll in range(permutations):
            share = (roll + 1) / (permutations + 1)
            streams.append(Stream(f"null_{roll}", every, share=share))
        streams += [Stream("untrained", every), Stream("standardised", on_states)]
    else:
        streams = [Stream("value", every)]
    if beside and on_states:
        streams.append(Stream(beside, on_states))
    return streams


class ModelRows(NamedTuple):
    """Rows of one model in one batch.

    Attributes:
        states: (L, N, d), of the layers that are read.
        heads: attention between words, (L, H, B, W, W); None where there is none.
    """

    states: Tensor
    heads: Tensor | None = None


class BatchRows(NamedTuple):
    """The rows of one batch of one stream.

    Attributes:
        text: (N,) number of the text of each row; token: (N,) place of the row in its text.
        words: (B,) words of each text, of those that have any; none without attention.
        x: rows of each model where it is X, by its number; y: where it is Y.
    """

    text: Tensor
    token: Tensor
    words: Tensor
    x: Mapping[int, ModelRows]
    y: Mapping[int, ModelRows]

    def rolled(self, share: float) -> Self:
        """Rows and attention of X paired with those of other texts of Y: the null of every measure.

        Args:
            share: see `aligners.similarity.controls.permuted_rows`.

        Raises:
            ValueError: as there.
        """
        index_x, index_y = permuted_rows(self.text, share)
        words = self.words
        if len(words) < 2:
            words = words[:0]
        shift = rolled_by(share, len(words))
        both = torch.minimum(words, words.roll(shift))

        x, y = {}, {}
        for m, (states, heads) in self.x.items():
            heads_x = heads_y = heads
            if heads is not None and len(both):
                rolled = heads.roll(shift, 2)
                heads_x = cropped(heads, both)
                heads_y = cropped(rolled, both)
            x[m] = ModelRows(states[:, index_x], heads_x)
            y[m] = ModelRows(states[:, index_y], heads_y)
        text = self.text[index_x]
        token = self.token[index_x]
        return type(self)(text, token, both, x, y)
