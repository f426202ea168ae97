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

Pair = tuple[int, int]  # positions of a layer of X and of one of Y within a tile
Matching = Sequence[Pair]  # of matching layers
# of some layers in one batch: `moments`, states (L, N, d); of a batch with words also `heads`, the attention between
# them (L, H, B, W, W), their number in each text, `words` (B,), and `head_moments`, the pairs of words (L, M, H)
Given = Mapping[str, Tensor]
Means = Mapping[Family, Tensor]  # of the rows of all ranks, (L, d)
Content = tuple[Family, int]  # what measures of one family and budget share
Admitted = tuple[Tensor, Tensor]  # places in a sample, and rows for them


class SpanSums:
    """What is kept of some layers of a model in one stream, for all pairs that the model is in.

    Args:
        stream: which.
        span: the layers.
        settings: settings of the comparison.

    Attributes:
        shape: sizes of the model, with these layers.
        moments: moments of states (`moments`) and of attention weights (`head_moments`): of all texts, then of each
            group that is told apart.
        samples: rows by budget, (L, budget, d) float32.
    """

    def __init__(self, stream: Stream, span: Span, settings: Settings) -> None:
        self.shape = settings.shape_of(span)
        self.device = settings.device
        layers, width, blocks, heads = self.shape
        self.moments: dict[Family, list[SideSums]] = {}
        if "moments" in stream.families:
            zeros = self._zeros(stream, layers, width)
            self.moments["moments"] = zeros
        if "head_moments" in stream.families and span.first == 0:
            zeros = self._zeros(stream, blocks, heads)
            self.moments["head_moments"] = zeros
        self.samples: dict[int, Tensor] = {}
        for budget in stream.budgets:
            rows = torch.zeros(layers, budget, width, device=self.device)
            self.samples[budget] = rows

    def update(
        self, given: Given, group: int, admitted: Mapping[int, Admitted]
    ) -> None:
        """Add a batch whose texts belong to one group; `admitted` is what `Draw.admit` says of its rows."""
        for budget, (places, rows) in admitted.items():
            some = given["moments"][:, rows]
            sample = self.samples[budget]
            sample[:, places] = some.float()
        for family, sides in self.moments.items():
            if family not in given:
                continue
            states = given[family]
            whole, *groups = sides
            whole.add_(states)
            if groups:
                groups[group].add_(states)

    def _zeros(self, stream: Stream, layers: int, width: int) -> list[SideSums]:
        """The sums of no texts: of all of them, then of each group that is told apart."""
        count = 1
        if stream.groups > 1:
            count += stream.groups
        sides = []
        for _ in range(count):
            side = SideSums.zeros(layers, width, self.device)
            sides.append(side)
        return sides

    @cached_property
    def white(self) -> Whitenings:
        """The whitenings of the layers, for all pairs that the model is in; once the pass has ended."""
        whole, *_ = self.moments["moments"]
        return whitenings(whole.xx)

    def means(self) -> Means:
        """The mean of all texts over all ranks."""
        means = {}
        for family, sides in self.moments.items():
            whole, *_ = sides
            n = summed(whole.n.clone())
            total = whole.n * whole.shift
            total = summed(total + whole.sum)
            means[family] = total / n.clamp(min=1)
        return means

    def end(self, means: Means, draws: Mapping[int, Draw]) -> None:
        """Make the sums those of all ranks, about the mean of all rows, and the samples those of all ranks."""
        for family, sides in self.moments.items():
            mean = means[family]
            for sums in sides:
                sums.move_(mean)
                n, _, *others = sums
                for value in (n, *others):
                    summed(value)
        for budget, rows in self.samples.items():
            draw = draws[budget]
            self.samples[budget] = draw.collect(rows)


class TileSums:
    """What is kept of the layer pairs of a tile in one stream, and what its measures are computed from.

    Args:
        stream: which.
        tile: the layer pairs.
        sides: what is kept of the layers of X, and of Y.
        settings: settings of the comparison.

    Attributes:
        groups: groups of texts that are told apart; 1: they are not.
        moments: sums within and between the two models, of all texts; None without measures on moments.
        matched: those of each group, by matching layers.
        parts: parts of each group, HSICs of batches, sums over pairs of heads, and moments of attention weights.
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
        self._contents: dict[Content, Any] = {}
        families = stream.families
        if not tile.leads:
            families -= set(ATTENTION)

        self.moments: GridSums | None = None
        self.matched: dict[Pair, list[GridSums]] = {}
        if "moments" in families:
            self.moments = self._nothing("moments")
            if self.groups > 1:
                self._begin_matched(settings.matching(tile))
        self.parts: dict[Family, list[Any]] = {}
        for family in ("batches", "heads", "head_moments"):
            if family in families:
                self.parts[family] = self._of_groups(family)

    def _begin_matched(self, matching: Matching) -> None:
        """Begin the sums of each group at matching layers."""
        for pair in matching:
            self.matched[pair] = self._of_groups("moments", pair)

    def _of_groups(self, family: Family, *pair: Pair) -> list[Any]:
        """What is kept of each group; where there are several, a side keeps them after all texts."""
        first = int(self.groups > 1)
        places = range(first, first + self.groups)
        return [self._nothing(family, place, *pair) for place in places]

    def _nothing(self, family: Family, place: int = 0, pair: Pair | None = None) -> Any:
        """What is kept of no texts; sums within the models are views of what these keep."""
        x = self.x.shape
        y = self.y.shape
        device = self.x.device
        if family == "batches":
            return HSIC.zeros(x.layers, y.layers, device)
        if family == "heads":
            sizes = x.blocks, x.heads, y.blocks, y.heads
            return AttentionSums.zeros(*sizes, device)
        sides_x = self.x.moments[family]
        sides_y = self.y.moments[family]
        layers_x, layers_y = _slices(pair)
        side_x = sides_x[place].of(layers_x)
        side_y = sides_y[place].of(layers_y)
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
            grid = grids[group]
            _add(grid, states_x[a], states_y[b])

        if self.groups == 1:
            group = 0
        for family, parts in self.parts.items():
            if family == "batches":
                parts[group] += unbiased_hsic(states_x, states_y)
                continue
            if family not in x:
                continue
            of_x = x[family]
            of_y = y[family]
            if family == "heads":
                words = x["words"]
                parts[group] += attention_sums(of_x, of_y, words)
            else:
                _add(parts[group], of_x, of_y)

    def end(self, x: Means, y: Means, owner: int, draws: Mapping[int, Draw]) -> None:
        """Make the sums between the models those of all ranks, about the means of all rows, on the rank that owns them.

        Those within the models come after.
        """
        for budget, draw in draws.items():
            self.texts[budget] = draw.text
        for family, (a, b), grid in self._grids():
            mean_x = x[family][a]
            mean_y = y[family][b]
            within_x, within_y, cross = grid
            cross.move_(within_x, within_y, mean_x, mean_y)
            for value in cross:
                summed(value, owner)
        for family, parts in self.parts.items():  # in the same order on all ranks
            if family == "head_moments":
                continue
            for group, sums in enumerate(parts):
                values = [summed(value, owner) for value in sums]
                kind = type(sums)
                parts[group] = kind(*values)

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
            white = self.x.white, self.y.white
            return SharedMoments(moments, *white)
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
        text = self.texts[budget]
        return Sample(x, y, text)

    def _samples(self, budget: int) -> list[Sample]:
        """The rows of each group."""
        x, y, text = self._sample(budget)
        group = text % self.groups
        counts = group.bincount(minlength=self.groups)
        sizes = counts.tolist()
        xs = x.split(sizes, 1)
        ys = y.split(sizes, 1)
        texts = text.split(sizes)
        return list(map(Sample, xs, ys, texts))

    def _grids(self) -> Iterator[tuple[Family, tuple[slice, slice], GridSums]]:
        """All sums between the models about the shifts of these, with the layers of X and of Y that they are of."""
        whole = _slices(None)
        if self.moments is not None:
            yield "moments", whole, self.moments
        for pair, grids in self.matched.items():
            layers = _slices(pair)
            for grid in grids:
                yield "moments", layers, grid
        of_heads = self.parts.get("head_moments", ())
        for grid in of_heads:
            yield "head_moments", whole, grid


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


def _slices(pair: Pair | None) -> tuple[slice, slice]:
    """Layers of X and of Y: one of each, or all."""
    if pair is None:
        return slice(None), slice(None)
    a, b = pair
    of_x = slice(a, a + 1)
    of_y = slice(b, b + 1)
    return of_x, of_y
