"""The streams of paired rows that a comparison sums: the rows as they are, and those of its controls."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from torch import Tensor

from aligners.datamodules.tokens.splits import Split
from aligners.similarity.catalogue import ATTENTION, Family, Measure
from aligners.similarity.controls import cropped
from aligners.similarity.text_orders import AS_PAIRED, permuted_rows, permuted_texts

ALIGNED = "aligned"  # the stream of the rows that are permuted, as they are paired
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
        name: value, aligned, null_0, null_1, ..., untrained, standardised, fit, with_far or without_far.
        measures: to be computed from it.
        groups: groups of texts that are told apart, for a jackknife along matching layers; 1: they are not.
        split: the texts that it reads.
        order: number of the order in which X's texts meet Y's, see `permuted_rows`; None: all rows, as they are.
    """

    name: str
    measures: tuple[Measure, ...]
    groups: int = 1
    split: Split = "test"
    order: int | None = None

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
        if self.order:
            return "x", "y"
        return "x", "x"

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
        streams.append(Stream(ALIGNED, every, order=AS_PAIRED))
        for draw in range(permutations):
            streams.append(Stream(f"null_{draw}", every, order=draw + 1))
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

    def reordered(self, order: int, seed: int) -> Self:
        """Rows and attention of X paired with those of other texts of Y: the null of every measure.

        Args:
            order: see `aligners.similarity.text_orders.permuted_rows`.
            seed: see there.

        Raises:
            ValueError: as there.
        """
        index_x, index_y = permuted_rows(self.text, order, seed)
        words = self.words[:0]
        if len(self.words) > 1:
            first = int(self.text[0])
            places = permuted_texts(self.words, first, order, seed)
            of_x, of_y, words = (each.to(self.words.device) for each in places)

        x, y = {}, {}
        for m, (states, heads) in self.x.items():
            heads_x = heads_y = heads
            if heads is not None and len(words):
                heads_x = cropped(heads[:, :, of_x], words)
                heads_y = cropped(heads[:, :, of_y], words)
            x[m] = ModelRows(states[:, index_x], heads_x)
            y[m] = ModelRows(states[:, index_y], heads_y)
        text = self.text[index_x]
        token = self.token[index_x]
        return type(self)(text, token, words, x, y)
