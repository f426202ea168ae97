"""The streams of paired rows that a comparison sums, and what a pass keeps of each: of layers, and of pairs of them."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, reduce
from operator import add
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from aligners.datamodules.tokens.splits import Split
from aligners.similarity.algebra.grid import CrossSums, GridSums, ShiftedRows, SideSums
from aligners.similarity.catalogue import ATTENTION, Family, Measure
from aligners.similarity.controls import Draw, Sample, cropped, permuted_rows
from aligners.similarity.functional.attention import AttentionSums, attention_sums
from aligners.similarity.functional.canonical_correlations import Whitenings, whitenings
from aligners.similarity.functional.cca import SharedMoments
from aligners.similarity.functional.cka import HSIC, unbiased_hsic
from aligners.similarity.passes.ranks import summed

Matching = Sequence[tuple[int, int]]  # positions of matching layers within a tile
Means = Mapping[Family, Tensor]  # of the rows of all ranks, (L, d)
Key = tuple[
    Family, int, tuple[int, int] | None
]  # family, place of the group, layers of X and of Y or None for all
# What some layers of a model give of a batch: `moments`, their states (L, N, d). If the batch has words: `heads`, the
# attention between them (L, H, B, W, W); `words`, their number in each text (B,); `head_moments`, word pairs (L, M, H).
Given = Mapping[str, Tensor]


FAR_VALUES = {
    "leave_out": "with_far",
    "keep": "without_far",
}  # by `data.far_rows`, what stands beside the value


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
        return self.name in ("value", *FAR_VALUES.values()) or pair[0] != pair[1]

    def groups_of(self, pair: tuple[int, int]) -> int:
        """Groups that are told apart for this pair."""
        return self.groups if pair[0] != pair[1] else 1


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
        groups: of texts that are told apart.
        permutations: of the null.
        beside: with_far or without_far, the rows that stand beside those that count; None: there are none.
    """
    every = tuple(measures)
    on_states = tuple(measure for measure in measures if measure.family not in ATTENTION)
    counterpart = [Stream(beside, on_states)] if beside and on_states else []
    if not controls:
        return [Stream("value", every), *counterpart]
    fitted = tuple(measure for measure in measures if measure.held_out is not None)
    shares = [(roll + 1) / (permutations + 1) for roll in range(permutations)]
    observed = Stream("fit", fitted, split="fit"), Stream("value", every, groups)
    nulls = (Stream(f"null_{roll}", every, share=share) for roll, share in enumerate(shares))
    return [
        *observed,
        *nulls,
        Stream("untrained", every),
        Stream("standardised", on_states),
        *counterpart,
    ]


class BatchRows(NamedTuple):
    """The rows of one batch of one stream, of each model made when they are asked for.

    Attributes:
        text: (N,) number of the text of each row; token: (N,) place of the row in its text.
        words: (B,) words of each text, of those that have any; none without attention.
        of: from a model's number and the name of its side to its states (L, N, d), of the layers that are read, and
            the attention between words, (L, H, B, W, W), if there are any.
    """

    text: Tensor
    token: Tensor
    words: Tensor
    of: Callable[[int, str], tuple[Tensor, Tensor | None]]

    def rolled(self, share: float) -> Self:
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

        def of(m: int, side: str) -> tuple[Tensor, Tensor | None]:
            states, weights = self.of(m, side)
            if weights is not None and len(both):
                weights = cropped(weights if side == "x" else weights.roll(shift, 2), both)
            return states[:, index[side]], weights

        return type(self)(self.text[index["x"]], self.token[index["x"]], both, of)


class SpanSums:
    """What is kept of some layers of a model in one stream, for all pairs that the model is in.

    Args:
        stream: which.
        shape: of the model; its layers are those of the span.
        groups: of texts that are told apart; 1: they are not.
        heads: keep sums of its attention heads too.
        device: where the rows are.

    Attributes:
        moments: of states (`moments`) and of attention weights (`head_moments`): of all texts, then of each group that
            is told apart.
        samples: rows by budget, (L, budget, d) float32.
        shifted: rows of the last batch about the shifts of all texts.
    """

    def __init__(
        self, stream: Stream, shape: Shape, groups: int, heads: bool, device: torch.device
    ) -> None:
        sizes: dict[Family, tuple[int, int]] = {"moments": (shape.layers, shape.width)}
        sizes |= {"head_moments": (shape.blocks, shape.heads)} if heads else {}
        self.shape, self.device = shape, device
        self.moments: dict[Family, list[SideSums]] = {
            family: [
                SideSums.zeros(*size, device) for _ in range(1 + (groups if groups > 1 else 0))
            ]
            for family, size in sizes.items()
            if family in stream.families
        }
        self.samples = {
            rows: torch.zeros(shape.layers, rows, shape.width, device=device)
            for rows in stream.budgets
        }
        self.shifted: dict[Family, ShiftedRows] = {}

    def update(
        self, given: Given, group: int, admitted: Mapping[int, tuple[Tensor, Tensor]]
    ) -> None:
        """Add a batch whose texts belong to one group; `admitted` is what `Draw.admit` says of its rows."""
        for budget, (places, rows) in admitted.items():
            self.samples[budget][:, places] = given["moments"][:, rows].float()
        for family, (whole, *groups) in self.moments.items():
            if family in given:
                self.shifted[family] = whole.add_(given[family])
                for sums in groups[group : group + 1]:
                    sums.add_(given[family])

    @cached_property
    def white(self) -> Whitenings:
        """The whitenings of the layers, for all pairs that the model is in; once the pass has ended."""
        return whitenings(self.moments["moments"][0].xx)

    def means(self) -> Means:
        """The mean of all texts over all ranks."""
        means = {}
        for family, (whole, *_) in self.moments.items():
            n, total = summed(whole.n.clone()), summed(whole.n * whole.shift + whole.sum)
            means[family] = total / n.clamp(min=1)
        return means

    def end(self, means: Means, draws: Mapping[int, Draw]) -> None:
        """Make the sums those of all ranks, about the mean of all rows, and the samples those of all ranks."""
        for family, every in self.moments.items():
            for sums in every:
                sums.move_(means[family])
                for value in (sums.n, *sums[2:]):
                    summed(value)
        for budget, rows in self.samples.items():
            self.samples[budget] = draws[budget].collect(rows)


class TileSums:
    """What is kept of the layer pairs of a tile in one stream, and what its measures are computed from.

    Args:
        stream: which.
        x: what is kept of the layers of X; y: of Y.
        matching: positions of the matching layers, for which groups are told apart in moments.
        groups: of texts that are told apart; 1: they are not.
        heads: keep what belongs to the pair's attention too.
        products: precision of the products of X with Y, see `CrossSums.add_`.

    Attributes:
        grids: sums within and between the two models: of states, of all texts (place 0) and of the matching layers in
            each group that is told apart (places from 1 on); of attention weights, of all texts or of each group.
        added: of each group, HSICs of batches and sums over pairs of heads.
        texts: ids of the texts of the samples' rows, group by group, by budget; once the pass has ended.
    """

    def __init__(
        self,
        stream: Stream,
        x: SpanSums,
        y: SpanSums,
        matching: Matching,
        groups: int,
        heads: bool,
        products: torch.dtype,
    ) -> None:
        self.x, self.y, self.groups, self.products = x, y, groups, products
        families = stream.families if heads else stream.families - set(ATTENTION)
        apart = list(range(1, groups + 1)) if groups > 1 else []
        keys: list[Key] = [
            ("moments", 0, None),
            *(("moments", place, pair) for place in apart for pair in matching),
        ]
        keys += [("head_moments", place, None) for place in apart or [0]]
        self.grids = {key: self._nothing(key) for key in keys if key[0] in families}
        heads_of_both = (x.shape.blocks, x.shape.heads, y.shape.blocks, y.shape.heads)
        zeros: dict[Family, Callable[[], Any]] = {
            "batches": lambda: HSIC.zeros(x.shape.layers, y.shape.layers, x.device),
            "heads": lambda: AttentionSums.zeros(*heads_of_both, x.device),
        }
        self.added = {
            family: [zero() for _ in range(groups)]
            for family, zero in zeros.items()
            if family in families
        }
        self.texts: Mapping[int, Tensor] = {}
        self._contents: dict[tuple[Family, int], Any] = {}

    def update(self, x: Given, y: Given, group: int) -> None:
        """Add a batch whose texts belong to one group, which the two sides have already."""
        place = group if self.groups > 1 else 0
        if "batches" in self.added:
            self.added["batches"][place] += unbiased_hsic(x["moments"], y["moments"])
        if "heads" in self.added and "heads" in x:
            self.added["heads"][place] += attention_sums(x["heads"], y["heads"], x["words"])
        for (family, place, pair), grid in self.grids.items():
            if place == 0 and family in x:
                products = self.products if family == "moments" else torch.float64
                grid.cross.add_(self.x.shifted[family], self.y.shifted[family], products)
            elif place == 1 + group and family in x:
                a, b = _slices(pair)
                grid.cross.add_(grid.x.shifted(x[family][a]), grid.y.shifted(y[family][b]))

    def end(self, x: Means, y: Means, owner: int, texts: Mapping[int, Tensor]) -> None:
        """Make the sums between the models those of all ranks, about the means of all rows, on the rank that owns them.

        Those within the models come after.
        """
        self.texts = texts
        for (family, _, pair), grid in self.grids.items():
            a, b = _slices(pair)
            grid.cross.move_(grid.x, grid.y, x[family][a], y[family][b])
            for value in grid.cross:
                summed(value, owner)
        for every in self.added.values():
            every[:] = [type(sums)(*(summed(value, owner) for value in sums)) for sums in every]

    def of(self, measure: Measure) -> Any:
        """What a measure is computed from, over all groups; one object for all measures that share it."""
        key = measure.family, measure.budget
        if key not in self._contents:
            if measure.family == "moments":
                moments = self.grids["moments", 0, None].centred()
                self._contents[key] = SharedMoments(moments, self.x.white, self.y.white)
            elif measure.family == "rows":
                self._contents[key] = self._sample(measure.budget)
            else:
                self._contents[key] = joined(self._groups(measure))
        return self._contents[key]

    def at(self, measure: Measure, a: int, b: int) -> list[Any]:
        """What is kept of each group at one of the matching pairs of layers, by index; `joined` adds it up."""
        if measure.family == "moments":
            return [grid for (_, _, pair), grid in self.grids.items() if pair == (a, b)]
        return [part.pair(a, b) for part in self._groups(measure)]

    def _groups(self, measure: Measure) -> list[Any]:
        """What is kept of each group, for all layers."""
        if measure.family in self.added:
            return self.added[measure.family]
        if measure.family == "head_moments":
            return [grid for (family, _, _), grid in self.grids.items() if family == "head_moments"]
        whole = self._sample(measure.budget)
        sizes = (whole.text % self.groups).bincount(minlength=self.groups).tolist()
        parts = zip(
            whole.x.split(sizes, 1), whole.y.split(sizes, 1), whole.text.split(sizes), strict=True
        )
        return [Sample(*part) for part in parts]

    def _sample(self, budget: int) -> Sample:
        return Sample(self.x.samples[budget], self.y.samples[budget], self.texts[budget])

    def _nothing(self, key: Key) -> GridSums:
        """Sums of no rows, of which those within the models are views of what these keep."""
        family, place, pair = key
        a, b = _slices(pair)
        x, y = self.x.moments[family][place].of(a), self.y.moments[family][place].of(b)
        return GridSums(x, y, CrossSums.zeros(x, y))


def joined(groups: Sequence[Any]) -> Any:
    """What a measure is computed from, of groups of texts together."""
    total = reduce(add, groups)
    return SharedMoments(total.moments()) if isinstance(total, GridSums) else total


def _slices(pair: tuple[int, int] | None) -> tuple[slice, slice]:
    """Layers of X and of Y: one of each, or all."""
    return (
        (slice(None), slice(None))
        if pair is None
        else (slice(pair[0], pair[0] + 1), slice(pair[1], pair[1] + 1))
    )
