"""What measures are computed from, once a pass has ended: the sums and samples of one tile in one stream."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any, cast

import torch
from torch import Tensor

from aligners.similarity.algebra.grid import GridSums
from aligners.similarity.catalogue import Measure
from aligners.similarity.functional.attention import AttentionSums
from aligners.similarity.functional.hsic import HSIC
from aligners.similarity.passes.sums import SpanSums, TileSums
from aligners.similarity.sample import Sample
from aligners.similarity.shared import SharedMoments

__all__ = ["Content", "Part", "evaluate"]

Kept = GridSums | HSIC | Sample | AttentionSums


def evaluate(measure: Measure, content: Any) -> dict[str, Tensor]:
    """(L_x, L_y) in each direction: `both` for a symmetric measure, else `forward` (X to Y) and `backward`."""
    forward = measure.compute(content)
    if measure.symmetric:
        return {"both": forward}
    return {"forward": forward, "backward": measure.compute(content.swap()).mT}


class Part:
    """The sums or rows of one or more groups of texts, for one family; parts add up.

    Args:
        kept: the sums or rows.
    """

    def __init__(self, kept: Kept) -> None:
        self.kept = kept

    def __add__(self, other: Part) -> Part:
        """Both groups together."""
        a, b = self.kept, other.kept
        if isinstance(a, GridSums):
            return Part(a + b)
        if isinstance(a, Sample) and isinstance(b, Sample):
            return Part(Sample(torch.cat([a.x, b.x], 1), torch.cat([a.y, b.y], 1), torch.cat([a.text, b.text])))
        return Part(type(a)(*(one + cast(Tensor, two) for one, two in zip(a, b, strict=True))))

    def pair(self, i: int, j: int) -> Part:
        """The part of one layer of X and one of Y, by index."""
        kept, i_, j_ = self.kept, slice(i, i + 1), slice(j, j + 1)
        if isinstance(kept, GridSums):
            return Part(kept.pair(i, j))
        if isinstance(kept, Sample):
            return Part(Sample(kept.x[i_], kept.y[j_], kept.text))
        if isinstance(kept, HSIC):
            return Part(HSIC(kept.xy[i_, j_], kept.xx[i_], kept.yy[j_]))
        return Part(AttentionSums(*(value[i_, :, j_] if value.ndim else value for value in kept)))

    def content(self) -> Any:
        """What the family's measures are computed from."""
        return SharedMoments(self.kept.moments()) if isinstance(self.kept, GridSums) else self.kept


class Content:
    """What the measures of one tile are computed from, in one stream.

    Args:
        x: what is kept of X; y: of Y.
        tile: of both.
        texts: ids of the texts of the samples' rows, group by group, by budget.
    """

    def __init__(self, x: SpanSums, y: SpanSums, tile: TileSums, texts: dict[int, Tensor]) -> None:
        self._x, self._y, self._tile, self._texts = x, y, tile, texts
        self._found: dict[str, Any] = {}

    @property
    def groups(self) -> int:
        """Groups of texts that are told apart."""
        return self._tile.groups

    def of(self, measure: Measure) -> Any:
        """What a measure is computed from, over all groups; one object for all measures that share it."""
        key = measure.family if measure.family != "rows" else str(measure.budget)
        if key not in self._found:
            if measure.family == "moments" and self._tile.states is not None:
                sums = GridSums(self._x.states[0], self._y.states[0], self._tile.states)
                self._found[key] = SharedMoments(sums.centred())
            elif measure.family == "rows":
                self._found[key] = self._sample(measure.budget)
            else:
                self._found[key] = reduce(add, self._groups(measure)).content()
        return self._found[key]

    def at(self, measure: Measure, a: int, b: int) -> list[Part]:
        """The part of each group at one of the matching pairs of layers, by index."""
        if measure.family != "moments":
            return [part.pair(a, b) for part in self._groups(measure)]
        sides = zip(self._x.states[1:], self._y.states[1:], self._tile.matching[a, b], strict=True)
        one, other = slice(a, a + 1), slice(b, b + 1)
        return [Part(GridSums(x.of(one), y.of(other), cross)) for x, y, cross in sides]

    def _groups(self, measure: Measure) -> list[Part]:
        """The part of each group, for all layers."""
        if measure.family == "batches":
            return [Part(sums) for sums in self._tile.batches]
        if measure.family == "heads":
            return [Part(sums) for sums in self._tile.attention]
        if measure.family == "head_moments":
            some = slice(1, None) if self._tile.groups > 1 else slice(1)
            sides = zip(self._x.heads[some], self._y.heads[some], self._tile.heads, strict=True)
            return [Part(GridSums(*each)) for each in sides]
        whole, groups = self._sample(measure.budget), self._tile.groups
        ends = (whole.text % groups).bincount(minlength=groups).cumsum(0).tolist()
        here = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        return [Part(Sample(whole.x[:, s], whole.y[:, s], whole.text[s])) for s in here]

    def _sample(self, budget: int) -> Sample:
        return Sample(self._x.samples[budget], self._y.samples[budget], self._texts[budget])
