"""Far rows: states so far from all others that they dominate every variance.

Language models give the first token of a text, and some others, states that are tens to hundreds of times as large as
the rest (Sun et al. 2024, "Massive Activations in Large Language Models", arXiv 2402.17762). A few rows in a hundred
then hold nearly all of the variance, and a map that predicts only these leaves next to nothing unexplained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from aligners.models.architectures import Component

FarRows = Literal["leave_out", "keep"]
# In residual streams the other rows are at most 2.5 median distances away, and far rows mostly 10 to
# 300. What sub-layers add varies more: in some models rows reach 10 without a gap.
FAR = 5.0
FAR_IN_SUBLAYERS = 10.0
MOST = 1 / 3  # largest share of rows that can be far: more of them are no exceptions
SAMPLE_TEXTS, SAMPLE_ROWS = 64, 2048  # rows on which it is measured what is far
CONSTANT = 1e-5  # a median distance below this share of the median row's length is a rounding error
MOSTLY = 0.9


class Reach(NamedTuple):
    """How far from the median row the states of L layers lie; a row beyond the radius at any layer is far.

    Attributes:
        centre: (L, 1, d) median of each feature.
        radius: (L, 1) radius: a multiple of the median distance from the centre.
    """

    centre: Tensor
    radius: Tensor

    @classmethod
    def of(cls, states: Tensor, component: Component = "residual") -> Self:
        """Measure centre and radius on states (L, N, d).

        Args:
            states: states of all rows, or of a sample of them.
            component: what the states are; see `FAR` and `FAR_IN_SUBLAYERS`.
        """
        times = FAR if component == "residual" else FAR_IN_SUBLAYERS
        centre = states.median(1, keepdim=True).values
        distance = (states - centre).norm(dim=-1).median(1, keepdim=True).values
        varies = distance > CONSTANT * centre.norm(dim=-1)
        reach = cls(centre, (times * distance).where(varies, torch.inf))

        beyond = reach.distances(states) > 1
        too_many = beyond.float().mean(1, keepdim=True) > MOST
        return cls(centre, reach.radius.where(~too_many, torch.inf))

    def distances(self, states: Tensor) -> Tensor:
        """Distances from the centre in units of the radius: (L, N, d) -> (L, N)."""
        centre = self.centre.to(states.device)
        radius = self.radius.to(states.device)
        return (states - centre).norm(dim=-1) / radius

    def beyond(self, states: Tensor) -> Tensor:
        """Return which rows are far at some layer: (L, N, d) -> (N,) bool."""
        return (self.distances(states) > 1).any(0)


def far_rows(states: Tensor, component: Component = "residual") -> Tensor:
    """Which rows are far from all others at some layer: (L, N, d) or (N, d) -> (N,) bool."""
    layers = states if states.ndim == 3 else states[None]
    return Reach.of(layers, component).beyond(layers)


@dataclass
class FarSample:
    """Findings about a model's rows of one kind on some texts.

    Attributes:
        reach: of the layers.
        far: (N,) bool, rows that are far.
        first: (N,) bool, rows that come first in their texts.
        layers: numbers of the layers.
        times: (L,) distance of the furthest row, in median distances.
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
    def of(
        cls, states: Tensor, first: Tensor, layers: Sequence[int], component: Component
    ) -> Self:
        """Examine states (L, N, d), of which `first` (N,) come first in their texts."""
        reach = Reach.of(states, component)
        far = reach.beyond(states)
        times = []
        shares = []
        features = []
        for layer, centre in zip(states, reach.centre, strict=True):
            distances = (layer - centre).norm(dim=1)
            times.append(distances.max() / distances.median())
            squares = (layer - layer.mean(0)).square()
            by_feature = squares[far].sum(0)
            shares.append(by_feature.sum() / squares.sum())
            features.append(by_feature.max() / by_feature.sum())
        measured = torch.stack(times), torch.stack(shares), torch.stack(features)
        return cls(reach, far, first, layers, *measured)

    def words(self, name: str) -> str:
        """Say where the far rows of the named model stand out most, and how much of the variance they hold there."""
        place = int(self.shares.nan_to_num(0).argmax())
        which = "they"
        one_feature = ""
        if float(self.first[self.far].float().mean()) >= MOSTLY:
            which = "they, each the first of its text,"
        if float(self.features[place]) >= 1 / 2:
            one_feature = f", {float(self.features[place]):.0%} of that in one feature"
        return (
            f"at site {self.layers[place]} of {name} {which} are up to {float(self.times[place]):.0f} times as far "
            f"from the median row as half of the rows, and hold {float(self.shares[place]):.0%} of the variance"
            f"{one_feature}"
        )
