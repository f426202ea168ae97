"""Accumulators of a stream of paired rows: the sums or rows that each family of measures is computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from similarity.algebra.folding import word_pairs
from similarity.algebra.grid import GridSums
from similarity.attention import AttentionSimilarity
from similarity.catalogue import Family, Measure
from similarity.controls import cropped, permuted_rows
from similarity.functional.attention import AttentionSums
from similarity.functional.hsic import HSIC
from similarity.minibatch import MinibatchCKA
from similarity.moments import GridMomentsMetric
from similarity.sample import RowSample, Sample
from similarity.shared import SharedMoments

__all__ = ["Arm", "PairedRows", "Part", "Shape", "evaluate"]


class Shape(NamedTuple):
    """Sizes of one model: layers whose states are read, their width, blocks whose attention is read, their heads."""

    layers: int
    width: int
    blocks: int = 0
    heads: int = 0


class PairedRows(NamedTuple):
    """One batch of one pair of models.

    Attributes:
        x: (L_x, N, d_x) and y: (L_y, N, d_y).
        text: (N,) number of the text of each row; token: (N,) place of the row in its text.
        weights_x: (L_x, H_x, B, W, W) attention between words, or None; weights_y likewise.
        words: (B,) words of each text, or None.
    """

    x: Tensor
    y: Tensor
    text: Tensor
    token: Tensor
    weights_x: Tensor | None = None
    weights_y: Tensor | None = None
    words: Tensor | None = None

    def permuted(self, share: float) -> PairedRows:
        """Rows and attention of X paired with those of other texts of Y: the null of every measure.

        Args:
            share: see `similarity.controls.permuted_rows`.

        Raises:
            ValueError: as there.
        """
        index_x, index_y = permuted_rows(self.text, share)
        null = self._replace(
            x=self.x[:, index_x], y=self.y[:, index_y], text=self.text[index_x], token=self.token[index_x]
        )
        if self.weights_x is None or self.weights_y is None or self.words is None:
            return null
        if len(self.words) < 2:
            return null._replace(words=self.words[:0])
        shift = min(max(round(share * len(self.words)), 1), len(self.words) - 1)
        words = torch.minimum(self.words, self.words.roll(shift))
        return null._replace(
            weights_x=cropped(self.weights_x, words),
            weights_y=cropped(self.weights_y.roll(shift, 2), words),
            words=words,
        )


Kept = GridSums | HSIC | Sample | AttentionSums


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
        if isinstance(a, Sample):
            x, y = (torch.cat(rows, 1) for rows in ((a.x, b.x), (a.y, b.y)))  # type: ignore[union-attr]
            return Part(Sample(x, y, torch.cat([a.text, b.text])))  # type: ignore[union-attr]
        return Part(type(a)(*(one + two for one, two in zip(a, b, strict=True))))

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

    def content(self, *, in_place: bool = False) -> Any:
        """What the family's measures are computed from; with `in_place`, moments take the place of their sums."""
        return SharedMoments(self.kept.moments(in_place=in_place)) if isinstance(self.kept, GridSums) else self.kept


def evaluate(measure: Measure, content: Any) -> dict[str, Tensor]:
    """(L_x, L_y) in each direction: `both` for a symmetric measure, else `forward` (X to Y) and `backward`."""
    forward = measure.compute(content)
    if measure.symmetric:
        return {"both": forward}
    return {"forward": forward, "backward": measure.compute(content.swap()).mT}


class Arm(nn.Module):
    """Accumulators of one stream of paired rows, one for each family that the measures need.

    With `groups`, what each group of texts left behind can be told apart, for a jackknife along matching layers.
    Sums over batches and heads are small and kept by group; the grid of moments is not, so there is one grid, and
    by group the moments of the matching pairs alone.

    Args:
        measures: to be computed from it.
        x: sizes of X; y: sizes of Y.
        groups: number of groups of texts; 1: they are not told apart.
        matching: indices (a, b) of the layers for which they are.
        seed: of the sample of rows.
        products: precision of the products of X with Y, see `GridMomentsMetric`.
    """

    def __init__(
        self,
        measures: Iterable[Measure],
        x: Shape,
        y: Shape,
        groups: int = 1,
        matching: Sequence[tuple[int, int]] = (),
        seed: int = 0,
        products: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.groups, self.matching = groups, list(matching)
        make: dict[Family, Callable[[], nn.Module]] = {
            "batches": lambda: MinibatchCKA(x.layers, y.layers),
            "heads": lambda: AttentionSimilarity(x.blocks, x.heads, y.blocks, y.heads),
            "head_moments": lambda: GridMomentsMetric(x.blocks, x.heads, y.blocks, y.heads),
        }
        self.grid: GridMomentsMetric | None = None
        self.by_group, self.samples = nn.ModuleDict(), nn.ModuleDict()
        for measure in measures:
            if measure.family == "rows":
                sample = RowSample(measure.budget, x.layers, y.layers, x.width, y.width, seed=seed)
                self.samples[str(measure.budget)] = sample
            elif measure.family == "moments" and self.grid is None:
                self.grid = GridMomentsMetric(x.layers, x.width, y.layers, y.width, products=products)
            elif measure.family not in ("moments", *self.by_group):
                self.by_group[measure.family] = nn.ModuleList(make[measure.family]() for _ in range(groups))
        told_apart = range(groups) if self.grid is not None and groups > 1 else ()
        self.pairs = nn.ModuleList(
            nn.ModuleList(GridMomentsMetric(1, x.width, 1, y.width) for _ in self.matching) for _ in told_apart
        )
        self._parts: dict[str, list[Part]] = {}
        self._contents: dict[str, Any] = {}

    def update(self, rows: PairedRows, group: int = 0) -> None:
        """Add one batch, all of whose texts belong to `group`."""
        for sample in self.samples.values():
            cast(RowSample, sample).update(rows.x, rows.y, rows.text, rows.token)
        if self.grid is not None:
            self.grid.update(rows.x, rows.y)
            if len(self.pairs):
                for (a, b), metric in zip(self.matching, cast(Any, self.pairs)[group], strict=True):
                    metric.update(rows.x[a : a + 1], rows.y[b : b + 1])
        weights = (rows.weights_x, rows.weights_y)
        for family, groups in self.by_group.items():
            metric = cast(Any, groups)[group]
            if family == "batches":
                metric.update(rows.x, rows.y)
            elif rows.words is None or len(rows.words) == 0:
                continue  # no text of the batch has a word that all models see
            elif family == "heads":
                metric.update(*weights, rows.words)
            else:
                metric.update(*(word_pairs(cast(Tensor, each), rows.words) for each in weights))

    def content(self, measure: Measure) -> Any:
        """What a measure is computed from, over all groups and ranks; gathered on the first call, for good."""
        key = _key(measure)
        if key not in self._contents:
            if measure.family == "moments":
                self._contents[key], self.grid = Part(_kept(self.grid)).content(in_place=True), None
            elif measure.family == "rows":
                self._contents[key] = self._sample(key)
            else:
                self._contents[key] = reduce(add, self._gathered(measure)).content()
        return self._contents[key]

    def at(self, measure: Measure, a: int, b: int) -> list[Part]:
        """The part of each group at one of the matching pairs of layers, by index."""
        if measure.family != "moments":
            return [part.pair(a, b) for part in self._gathered(measure)]
        place = self.matching.index((a, b))
        return [Part(_kept(cast(Any, metrics)[place])) for metrics in self.pairs]

    def _gathered(self, measure: Measure) -> list[Part]:
        """The part of each group, for all layers."""
        key = _key(measure)
        if key not in self._parts:
            if measure.family == "rows":
                whole = cast(Sample, self.content(measure))
                ends = (whole.text % self.groups).bincount(minlength=self.groups).cumsum(0).tolist()
                here = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
                self._parts[key] = [Part(Sample(whole.x[:, s], whole.y[:, s], whole.text[s])) for s in here]
            else:
                self._parts[key] = [Part(_kept(metric)) for metric in cast(Sequence[Any], self.by_group[key])]
        return self._parts[key]

    def _sample(self, budget: str) -> Sample:
        """The sample of rows, group by group; what it was drawn from is dropped."""
        metric = cast(RowSample, self.samples.pop(budget))
        whole: Sample = metric.compute()
        metric.clear()
        if self.groups == 1:
            return whole
        order = (whole.text % self.groups).argsort(stable=True)
        return Sample(whole.x[:, order], whole.y[:, order], whole.text[order])


def _key(measure: Measure) -> str:
    return measure.family if measure.family != "rows" else str(measure.budget)


def _kept(metric: Any) -> Kept:
    if isinstance(metric, AttentionSimilarity):
        return metric.sums()
    with metric.sync_context(dist_sync_fn=metric.dist_sync_fn):
        return metric.sums()
