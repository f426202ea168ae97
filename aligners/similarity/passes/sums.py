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
from aligners.similarity.functional.attention import AttentionSums, attention_sums
from aligners.similarity.functional.canonical_correlations import Whitenings, whitenings
from aligners.similarity.functional.cca import SharedMoments
from aligners.similarity.functional.cka import HSIC, unbiased_hsic
from aligners.similarity.passes.pass_plan import Settings, Span, Tile
from aligners.similarity.passes.ranks import summed
from aligners.similarity.passes.streams import Stream

Matching = Sequence[tuple[int, int]]  # positions of matching layers within a tile
# of some layers in one batch: `moments`, states (L, N, d); of a batch with words also `heads`, the attention between
# them (L, H, B, W, W), their number in each text, `words` (B,), and `head_moments`, the pairs of words (L, M, H)
Given = Mapping[str, Tensor]
Means = Mapping[Family, Tensor]  # of the rows of all ranks, (L, d)


class SpanSums:
    """What is kept of some layers of a model in one stream, for all pairs that the model is in.

    Args:
        stream: which.
        span: the layers.
        settings: of the comparison.

    Attributes:
        shape: sizes of the model, with these layers.
        moments: of states (`moments`) and of attention weights (`head_moments`): of all texts, then of each group that
            is told apart.
        samples: rows by budget, (L, budget, d) float32.
    """

    def __init__(self, stream: Stream, span: Span, settings: Settings) -> None:
        self.shape = shape = settings.shape_of(span)
        self.device = settings.device
        self.moments: dict[Family, list[SideSums]] = {}
        if "moments" in stream.families:
            self.moments["moments"] = self._zeros(stream, shape.layers, shape.width)
        if "head_moments" in stream.families and span.first == 0:
            self.moments["head_moments"] = self._zeros(
                stream, shape.blocks, shape.heads
            )
        self.samples: dict[int, Tensor] = {}
        for budget in stream.budgets:
            rows = (shape.layers, budget, shape.width)
            self.samples[budget] = torch.zeros(rows, device=self.device)

    def update(
        self, given: Given, group: int, admitted: Mapping[int, tuple[Tensor, Tensor]]
    ) -> None:
        """Add a batch whose texts belong to one group; `admitted` is what `Draw.admit` says of its rows."""
        for budget, (places, rows) in admitted.items():
            some = given["moments"][:, rows]
            self.samples[budget][:, places] = some.float()
        for family, (whole, *groups) in self.moments.items():
            if family not in given:
                continue
            whole.add_(given[family])
            if groups:
                groups[group].add_(given[family])

    def _zeros(self, stream: Stream, layers: int, width: int) -> list[SideSums]:
        """The sums of no texts: of all of them, then of each group that is told apart."""
        count = 1
        if stream.groups > 1:
            count += stream.groups
        return [SideSums.zeros(layers, width, self.device) for _ in range(count)]

    @cached_property
    def white(self) -> Whitenings:
        """The whitenings of the layers, for all pairs that the model is in; once the pass has ended."""
        return whitenings(self.moments["moments"][0].xx)

    def means(self) -> Means:
        """The mean of all texts over all ranks."""
        means = {}
        for family, (whole, *_) in self.moments.items():
            n = summed(whole.n.clone())
            total = whole.n * whole.shift + whole.sum
            means[family] = summed(total) / n.clamp(min=1)
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
        tile: the layer pairs.
        sides: what is kept of the layers of X, and of Y.
        settings: of the comparison.

    Attributes:
        groups: of texts that are told apart; 1: they are not.
        moments: sums within and between the two models, of all texts; None without measures on moments.
        matched: those of each group, by matching layers.
        parts: of each group, HSICs of batches, sums over pairs of heads, and moments of attention weights.
        texts: ids of the texts of the samples' rows, group by group, by budget; once the pass has ended.
    """

    def __init__(
        self,
        stream: Stream,
        tile: Tile,
        sides: tuple[SpanSums, SpanSums],
        settings: Settings,
    ) -> None:
        self.x, self.y = sides
        self.groups = stream.groups_of(tile.pair)
        self.products = settings.products
        self.texts: dict[int, Tensor] = {}
        self._contents: dict[tuple[Family, int], Any] = {}
        families = stream.families
        if not tile.leads:
            families -= set(ATTENTION)

        self.moments: GridSums | None = None
        self.matched: dict[tuple[int, int], list[GridSums]] = {}
        if "moments" in families:
            self.moments = self._nothing("moments")
            if self.groups > 1:
                for pair in settings.matching(tile):
                    self.matched[pair] = self._of_groups("moments", pair)
        self.parts: dict[Family, list[Any]] = {}
        for family in ("batches", "heads", "head_moments"):
            if family in families:
                self.parts[family] = self._of_groups(family)

    def _of_groups(self, family: Family, *pair: tuple[int, int]) -> list[Any]:
        """What is kept of each group; where there are several, a side keeps them after all texts."""
        first = int(self.groups > 1)
        places = range(first, first + self.groups)
        return [self._nothing(family, place, *pair) for place in places]

    def _nothing(
        self, family: Family, place: int = 0, pair: tuple[int, int] | None = None
    ) -> Any:
        """What is kept of no texts; sums within the models are views of what these keep."""
        x, y = self.x.shape, self.y.shape
        device = self.x.device
        if family == "batches":
            return HSIC.zeros(x.layers, y.layers, device)
        if family == "heads":
            return AttentionSums.zeros(x.blocks, x.heads, y.blocks, y.heads, device)
        a, b = _slices(pair)
        side_x = self.x.moments[family][place].of(a)
        side_y = self.y.moments[family][place].of(b)
        cross = CrossSums.zeros(side_x, side_y)
        return GridSums(side_x, side_y, cross)

    def update(self, x: Given, y: Given, group: int) -> None:
        """Add a batch whose texts belong to one group, which the two sides have already."""
        states_x = x["moments"]
        states_y = y["moments"]
        if self.moments is not None:
            _add(self.moments, states_x, states_y, self.products)
        for pair, grids in self.matched.items():
            a, b = _slices(pair)
            _add(grids[group], states_x[a], states_y[b])

        if self.groups == 1:
            group = 0
        for family, parts in self.parts.items():
            if family == "batches":
                parts[group] += unbiased_hsic(states_x, states_y)
            elif family not in x:
                continue
            elif family == "heads":
                parts[group] += attention_sums(x[family], y[family], x["words"])
            else:
                _add(parts[group], x[family], y[family])

    def end(self, x: Means, y: Means, owner: int, draws: Mapping[int, Draw]) -> None:
        """Make the sums between the models those of all ranks, about the means of all rows, on the rank that owns them.

        Those within the models come after.
        """
        for budget, draw in draws.items():
            self.texts[budget] = draw.text
        for family, (a, b), grid in self._grids():
            mean_x = x[family][a]
            mean_y = y[family][b]
            grid.cross.move_(grid.x, grid.y, mean_x, mean_y)
            for value in grid.cross:
                summed(value, owner)
        for family, parts in self.parts.items():  # in the same order on all ranks
            if family == "head_moments":
                continue
            for group, sums in enumerate(parts):
                values = [summed(value, owner) for value in sums]
                parts[group] = type(sums)(*values)

    def of(self, measure: Measure) -> Any:
        """What a measure is computed from, over all groups; one object for all measures that share it."""
        key = (measure.family, measure.budget)
        if key not in self._contents:
            self._contents[key] = self._content(measure)
        return self._contents[key]

    def _content(self, measure: Measure) -> Any:
        """As `of`, made anew."""
        if self.moments is not None and measure.family == "moments":
            moments = self.moments.centred()
            return SharedMoments(moments, self.x.white, self.y.white)
        if measure.family == "rows":
            return self._sample(measure.budget)
        return joined(self.parts[measure.family])

    def at(self, measure: Measure, a: int, b: int) -> list[Any]:
        """What is kept of each group at one of the matching pairs of layers, by index; `joined` adds it up."""
        if measure.family == "moments":
            return self.matched[a, b]
        parts: Sequence[Any]
        if measure.family == "rows":
            parts = self._samples(measure.budget)
        else:
            parts = self.parts[measure.family]
        return [part.pair(a, b) for part in parts]

    def _sample(self, budget: int) -> Sample:
        """The rows of all groups."""
        x = self.x.samples[budget]
        y = self.y.samples[budget]
        return Sample(x, y, self.texts[budget])

    def _samples(self, budget: int) -> list[Sample]:
        """The rows of each group."""
        x, y, text = self._sample(budget)
        group = text % self.groups
        sizes = group.bincount(minlength=self.groups).tolist()
        xs = x.split(sizes, 1)
        ys = y.split(sizes, 1)
        return list(map(Sample, xs, ys, text.split(sizes)))

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
    if isinstance(total, GridSums):
        return SharedMoments(total.moments())
    return total


def _add(
    grid: GridSums, x: Tensor, y: Tensor, products: torch.dtype = torch.float64
) -> None:
    """Add paired rows to the sums between two models; those within them have these rows already."""
    rows_x = grid.x.shifted(x)
    rows_y = grid.y.shifted(y)
    grid.cross.add_(rows_x, rows_y, products)


def _slices(pair: tuple[int, int] | None) -> tuple[slice, slice]:
    """Layers of X and of Y: one of each, or all."""
    if pair is None:
        return slice(None), slice(None)
    a, b = pair
    return slice(a, a + 1), slice(b, b + 1)
