"""What a pass keeps of a stream of paired rows: of layers, and of pairs of layers; and what measures make of it."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from aligners.similarity.algebra.grid import CrossSums, GridSums, SideSums
from aligners.similarity.catalogue import ATTENTION, Family, Measure
from aligners.similarity.controls import Draw, Sample
from aligners.similarity.functional.attention import (
    AttentionSums,
    attention_sums,
    word_pairs,
)
from aligners.similarity.functional.canonical_correlations import Whitenings, whitenings
from aligners.similarity.functional.cca import SharedMoments
from aligners.similarity.functional.cka import HSIC, unbiased_hsic
from aligners.similarity.passes.ranks import summed
from aligners.similarity.passes.streams import Shape, Stream

Matching = Sequence[tuple[int, int]]  # positions of matching layers within a tile
# of some layers in one batch: `moments`, states (L, N, d); of a batch with words also `heads`, the attention between
# them (L, H, B, W, W), their number in each text, `words` (B,), and `head_moments`, the pairs of words (L, M, H)
Given = Mapping[str, Tensor]
Means = Mapping[Family, Tensor]  # of the rows of all ranks, (L, d)


def given_of(
    stream: Stream, states: Tensor, heads: Tensor | None, words: Tensor, ahead: bool
) -> Given:
    """What a batch has of some layers; for `ahead` see `word_pairs`."""
    given = {"moments": states}
    if heads is None or not len(words):
        return given
    given |= {"heads": heads, "words": words}
    if "head_moments" in stream.families:
        given["head_moments"] = word_pairs(heads, words, ahead)
    return given


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
    """

    def __init__(
        self,
        stream: Stream,
        shape: Shape,
        groups: int,
        heads: bool,
        device: torch.device,
    ) -> None:
        self.shape, self.device = shape, device
        sizes: dict[Family, tuple[int, int]] = {"moments": (shape.layers, shape.width)}
        if heads:
            sizes["head_moments"] = (shape.blocks, shape.heads)
        kept = 1 + groups if groups > 1 else 1
        self.moments: dict[Family, list[SideSums]] = {}
        for family, (layers, width) in sizes.items():
            if family in stream.families:
                sides = [SideSums.zeros(layers, width, device) for _ in range(kept)]
                self.moments[family] = sides
        self.samples: dict[int, Tensor] = {}
        for budget in stream.budgets:
            self.samples[budget] = torch.zeros(
                shape.layers, budget, shape.width, device=device
            )

    def update(
        self, given: Given, group: int, admitted: Mapping[int, tuple[Tensor, Tensor]]
    ) -> None:
        """Add a batch whose texts belong to one group; `admitted` is what `Draw.admit` says of its rows."""
        for budget, (places, rows) in admitted.items():
            self.samples[budget][:, places] = given["moments"][:, rows].float()
        for family, (whole, *groups) in self.moments.items():
            if family not in given:
                continue
            whole.add_(given[family])
            if groups:
                groups[group].add_(given[family])

    @cached_property
    def white(self) -> Whitenings:
        """The whitenings of the layers, for all pairs that the model is in; once the pass has ended."""
        return whitenings(self.moments["moments"][0].xx)

    def means(self) -> Means:
        """The mean of all texts over all ranks."""
        means = {}
        for family, (whole, *_) in self.moments.items():
            n = summed(whole.n.clone())
            total = summed(whole.n * whole.shift + whole.sum)
            means[family] = total / n.clamp(min=1)
        return means

    def end(self, means: Means, draws: Mapping[int, Draw]) -> None:
        """Make the sums those of all ranks, about the mean of all rows, and the samples those of all ranks."""
        for family, sides in self.moments.items():
            for sums in sides:
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
        moments: sums within and between the two models, of all texts; None without measures on moments.
        matched: those of each group, by matching layers.
        parts: of each group, HSICs of batches, sums over pairs of heads, and moments of attention weights.
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
        self.texts: Mapping[int, Tensor] = {}
        self._contents: dict[tuple[Family, int], Any] = {}
        families = stream.families
        if not heads:
            families -= set(ATTENTION)
        # where groups are told apart, a side keeps them after all texts
        places = range(1, groups + 1) if groups > 1 else range(1)

        self.moments: GridSums | None = None
        self.matched: dict[tuple[int, int], list[GridSums]] = {}
        if "moments" in families:
            self.moments = self._grid("moments", 0)
            for pair in matching if groups > 1 else ():
                self.matched[pair] = [
                    self._grid("moments", place, pair) for place in places
                ]

        self.parts: dict[Family, list[Any]] = {}
        blocks = x.shape.blocks, x.shape.heads, y.shape.blocks, y.shape.heads
        if "batches" in families:
            layers = x.shape.layers, y.shape.layers
            self.parts["batches"] = [HSIC.zeros(*layers, x.device) for _ in places]
        if "heads" in families:
            self.parts["heads"] = [
                AttentionSums.zeros(*blocks, x.device) for _ in places
            ]
        if "head_moments" in families:
            self.parts["head_moments"] = [
                self._grid("head_moments", place) for place in places
            ]

    def update(self, x: Given, y: Given, group: int) -> None:
        """Add a batch whose texts belong to one group, which the two sides have already."""
        place = group if self.groups > 1 else 0
        if self.moments is not None:
            _add(self.moments, x["moments"], y["moments"], self.products)
        for (a, b), grids in self.matched.items():
            _add(grids[group], x["moments"][a : a + 1], y["moments"][b : b + 1])
        if "batches" in self.parts:
            self.parts["batches"][place] += unbiased_hsic(x["moments"], y["moments"])
        if "heads" in self.parts and "heads" in x:
            self.parts["heads"][place] += attention_sums(
                x["heads"], y["heads"], x["words"]
            )
        if "head_moments" in self.parts and "head_moments" in x:
            _add(
                self.parts["head_moments"][place], x["head_moments"], y["head_moments"]
            )

    def end(self, x: Means, y: Means, owner: int, texts: Mapping[int, Tensor]) -> None:
        """Make the sums between the models those of all ranks, about the means of all rows, on the rank that owns them.

        Those within the models come after.
        """
        self.texts = texts
        for family, (a, b), grid in self._grids():
            grid.cross.move_(grid.x, grid.y, x[family][a], y[family][b])
            for value in grid.cross:
                summed(value, owner)
        for family in self.parts.keys() - {"head_moments"}:
            added = []
            for sums in self.parts[family]:
                values = [summed(value, owner) for value in sums]
                added.append(type(sums)(*values))
            self.parts[family] = added

    def of(self, measure: Measure) -> Any:
        """What a measure is computed from, over all groups; one object for all measures that share it."""
        key = measure.family, measure.budget
        if key not in self._contents:
            self._contents[key] = self._content(measure)
        return self._contents[key]

    def _content(self, measure: Measure) -> Any:
        if self.moments is not None and measure.family == "moments":
            return SharedMoments(self.moments.centred(), self.x.white, self.y.white)
        if measure.family == "rows":
            return self._sample(measure.budget)
        return joined(self.parts[measure.family])

    def at(self, measure: Measure, a: int, b: int) -> list[Any]:
        """What is kept of each group at one of the matching pairs of layers, by index; `joined` adds it up."""
        if measure.family == "moments":
            return self.matched[a, b]
        parts = self.parts.get(measure.family) or self._samples(measure.budget)
        return [part.pair(a, b) for part in parts]

    def _sample(self, budget: int) -> Sample:
        return Sample(
            self.x.samples[budget], self.y.samples[budget], self.texts[budget]
        )

    def _samples(self, budget: int) -> list[Sample]:
        """The rows of each group."""
        x, y, text = self._sample(budget)
        sizes = (text % self.groups).bincount(minlength=self.groups).tolist()
        parts = zip(
            x.split(sizes, 1), y.split(sizes, 1), text.split(sizes), strict=True
        )
        return [Sample(*part) for part in parts]

    def _grid(
        self, family: Family, place: int, pair: tuple[int, int] | None = None
    ) -> GridSums:
        """Sums of no rows, of which those within the models are views of what these keep."""
        a, b = _slices(pair)
        x, y = self.x.moments[family][place].of(a), self.y.moments[family][place].of(b)
        return GridSums(x, y, CrossSums.zeros(x, y))

    def _grids(self) -> Iterator[tuple[Family, tuple[slice, slice], GridSums]]:
        """All sums between the models about the shifts of these, with the layers of X and of Y that they are of."""
        if self.moments is not None:
            yield "moments", _slices(None), self.moments
        for pair, grids in self.matched.items():
            for grid in grids:
                yield "moments", _slices(pair), grid
        for grid in self.parts.get("head_moments", ()):
            yield "head_moments", _slices(None), grid


def joined(groups: Sequence[Any]) -> Any:
    """What a measure is computed from, of groups of texts together."""
    total = reduce(add, groups)
    return SharedMoments(total.moments()) if isinstance(total, GridSums) else total


def _add(
    grid: GridSums, x: Tensor, y: Tensor, products: torch.dtype = torch.float64
) -> None:
    """Add paired rows to the sums between two models; those within them have these rows already."""
    grid.cross.add_(grid.x.shifted(x), grid.y.shifted(y), products)


def _slices(pair: tuple[int, int] | None) -> tuple[slice, slice]:
    """Layers of X and of Y: one of each, or all."""
    if pair is None:
        return slice(None), slice(None)
    a, b = pair
    return slice(a, a + 1), slice(b, b + 1)
