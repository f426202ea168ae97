"""Far rows: states so far from all others that they alone decide every variance.

Language models give the first token of a text, and some others, states that are tens to hundreds of times as large as
the rest (Sun et al. 2024, "Massive Activations in Large Language Models", arXiv 2402.17762). A few of a hundred rows
then hold nearly all of the variance, and whatever predicts these alone leaves next to nothing unexplained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.rows.policies import RowKind, Rows, rows_of_each
from aligners.datamodules.tokens.tokenised import Marks
from aligners.models.architectures import Component

FarRows = Literal["leave_out", "keep"]
# In residual streams the furthest of the other rows are at most 2.5 median distances off, and far ones mostly 10 to
# 300. What sub-layers add varies more: some models' rows reach 10 without a gap.
FAR, FAR_IN_SUBLAYERS = 5.0, 10.0
MOST = 1 / 3  # of the rows: more of them are no exceptions
SAMPLE_TEXTS, SAMPLE_ROWS = 64, 2048  # by which it is measured what is far
CONSTANT = (
    1e-5  # a median distance that is less than this share of the median row's length is rounding
)
MOSTLY = 0.9


class Reach(NamedTuple):
    """How far from the median row the states of L layers are; a row beyond the radius at any of them is far.

    Attributes:
        centre: (L, 1, d) median of each feature.
        radius: (L, 1) some times the median distance from the centre.
    """

    centre: Tensor
    radius: Tensor

    @classmethod
    def of(cls, states: Tensor, component: Component = "residual") -> Self:
        """Measure it on states (L, N, d).

        Args:
            states: of all rows, or of some that stand for them.
            component: what they are: see `FAR` and `FAR_IN_SUBLAYERS`.
        """
        times = FAR if component == "residual" else FAR_IN_SUBLAYERS
        centre = states.median(1, keepdim=True).values
        distance = (states - centre).norm(dim=-1).median(1, keepdim=True).values
        least = CONSTANT * centre.norm(dim=-1)
        reach = cls(centre, (times * distance).where(distance > least, torch.inf))
        beyond = reach.distances(states) > 1
        too_many = beyond.float().mean(1, keepdim=True) > MOST
        return cls(centre, reach.radius.where(~too_many, torch.inf))

    def distances(self, states: Tensor) -> Tensor:
        """Distances from the centre in units of the radius: (L, N, d) -> (L, N)."""
        return (states - self.centre.to(states.device)).norm(dim=-1) / self.radius.to(states.device)

    def beyond(self, states: Tensor) -> Tensor:
        """Which rows are far at some layer: (L, N, d) -> (N,) bool."""
        return (self.distances(states) > 1).any(0)


def far_rows(states: Tensor, component: Component = "residual") -> Tensor:
    """Which rows are far from all others at some layer: (L, N, d) or (N, d) -> (N,) bool."""
    layers = states if states.ndim == 3 else states[None]
    return Reach.of(layers, component).beyond(layers)


@dataclass
class FarSample:
    """What is found out about a model's rows of one kind on some texts.

    Attributes:
        reach: of the layers.
        far: (N,) bool, rows that are far.
        first: (N,) bool, rows that are the first of their texts.
        layers: numbers of the layers.
        times: (L,) how many median distances the furthest row is off.
        shares: (L,) share of the variance that far rows hold.
        features: (L,) share of the far rows' squared deviation that one feature has.
    """

    reach: Reach
    far: Tensor
    first: Tensor
    layers: Sequence[int]
    times: Tensor
    shares: Tensor
    features: Tensor

    @classmethod
    def of(cls, states: Tensor, first: Tensor, layers: Sequence[int], component: Component) -> Self:
        """Look at states (L, N, d), of which `first` (N,) are the first of their texts."""
        reach = Reach.of(states, component)
        far = reach.beyond(states)
        times, shares, features = [], [], []
        for layer, centre in zip(states, reach.centre, strict=True):
            distances = (layer - centre).norm(dim=1)
            times.append(distances.max() / distances.median())
            squares = (layer - layer.mean(0)).square()
            by_feature = squares[far].sum(0)
            shares.append(by_feature.sum() / squares.sum())
            features.append(by_feature.max() / by_feature.sum())
        return cls(reach, far, first, layers, *map(torch.stack, (times, shares, features)))

    def words(self, name: str) -> str:
        """Say where the far rows of the model of this name stand out most, and how much they hold there."""
        place = int(self.shares.nan_to_num(0).argmax())
        times, share = float(self.times[place]), float(self.shares[place])
        which = "they, the first of their texts," if self.mostly_first else "they"
        feature = float(self.features[place])
        one = f", {feature:.0%} of that in one feature" if feature >= 1 / 2 else ""
        return (
            f"at site {self.layers[place]} of {name} {which} are up to {times:.0f} times as far from the median row as "
            f"half of the rows, and hold {share:.0%} of the variance{one}"
        )

    @property
    def mostly_first(self) -> bool:
        """Whether nearly all far rows are the first of their texts."""
        return float(self.first[self.far].float().mean()) >= MOSTLY


Reader = Callable[
    [TextBatch, Sequence[Rows]], list[Tensor]
]  # the rows (L, N, d) of each choice of a batch's rows


def sample_rows(
    batches: Iterable[TextBatch], number: int, kinds: Sequence[RowKind], layers: Sequence[int], component: Component,
    read: Reader,
) -> dict[RowKind, FarSample]:  # fmt: skip
    """Find out what is far for a model, kind by kind, on the first `SAMPLE_ROWS` rows of some texts.

    Args:
        batches: of the texts, on the CPU.
        number: of the model, whose inputs it reads.
        kinds: of rows.
        layers: of the model, that are read.
        component: what is read.
        read: reads them.
    """
    states: dict[RowKind, list[Tensor]] = {kind: [] for kind in kinds}
    first: dict[RowKind, list[Tensor]] = {kind: [] for kind in kinds}
    rows_so_far = 0
    for batch in batches:
        chosen = [rows_of_each(batch, kind)[number] for kind in kinds]
        for kind, rows, found in zip(kinds, chosen, read(batch, chosen), strict=True):
            states[kind].append(found.cpu())
            first[kind].append(rows.place == 0)
        rows_so_far += len(chosen[0])
        if rows_so_far >= SAMPLE_ROWS:
            break
    samples = {}
    for kind in kinds:
        every = torch.cat(states[kind], 1)
        if every.shape[1]:
            samples[kind] = FarSample.of(every, torch.cat(first[kind]), layers, component)
    return samples


def find_far(
    numbered: Iterable[tuple[Sequence[int], TextBatch]], texts: int, number: int, reaches: Mapping[RowKind, Reach],
    read: Reader,
) -> dict[RowKind, Marks]:  # fmt: skip
    """Mark the rows of a split that are far for a model.

    Args:
        numbered: batches that have every text once, each with the texts' places in the split.
        texts: of the split.
        number: of the model.
        reaches: kind of rows -> what is far.
        read: reads its rows.
    """
    marks: dict[RowKind, list[Tensor]] = {
        kind: [torch.zeros(0, dtype=torch.bool)] * texts for kind in reaches
    }
    for places, batch in numbered:
        chosen = [rows_of_each(batch, kind)[number] for kind in reaches]
        for (kind, reach), rows, states in zip(
            reaches.items(), chosen, read(batch, chosen), strict=True
        ):
            far = reach.beyond(states).cpu()
            for place, part in zip(places, far.split(list(rows.counts)), strict=True):
                marks[kind][place] = part
    found = {}
    for kind, parts in marks.items():
        counts = torch.tensor([len(part) for part in parts])
        found[kind] = Marks(torch.cat(parts), counts)
    return found
