"""Structural probes: whether a linear map of the states lays out a sentence's tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from probing.arms import Arm
from probing.bank import Probes
from probing.trees.asked import TreesPart

__all__ = ["DepthProbes", "DistanceProbes", "StructuralProbes"]

START = 0.05  # entries of B are drawn from -START..START, as in the paper's code


class StructuralProbes(Probes):
    """Maps h ↦ Bᵀh, which differ in the states that they read and in rank.

    Args:
        arms: with the rank of each.
        width: d, of the states.
        most: the highest rank; default: of these arms.

    Raises:
        ValueError: a rank is not between 1 and d.

    References:
        Hewitt and Manning 2019, "A structural probe for finding syntax in word representations", NAACL.
    """

    kept: Tensor

    def __init__(self, arms: Sequence[Arm], width: int, most: int | None = None) -> None:
        super().__init__(arms, width)
        ranks = [width if arm.rank is None else arm.rank for arm in arms]
        wrong = [rank for rank in ranks if not 1 <= rank <= width]
        if wrong:
            raise ValueError(f"Expected `ranks` between 1 and {width}, the width of the states, but got {wrong[0]}.")
        self.most = max(ranks) if most is None else most
        start = torch.empty(width, width).uniform_(-START, START)[:, : self.most]
        self.weight = nn.Parameter(start.expand(len(arms), -1, -1).clone())
        self.register_buffer("kept", torch.arange(self.most) < torch.tensor(ranks)[:, None], persistent=False)

    def options(self) -> dict[str, int]:
        """Everything but arms and width."""
        return {"most": self.most}

    def projected(self, read: Tensor, part: TreesPart) -> Tensor:
        """Bᵀh of the words of each sentence, padded: (A, n, d) -> (A, b, T, most), zero beyond an arm's rank."""
        return torch.bmm(read, self.weight * self.kept[:, None])[:, part.rows]


class DistanceProbes(StructuralProbes):
    """The squared distance |Bᵀ(h_i − h_j)|² stands for the distance of two words in the tree (§2.2)."""

    def forward(self, read: Tensor, part: TreesPart) -> Tensor:
        """Predict distances: (A, n, d) -> (A, b, T, T)."""
        found = self.projected(read, part)
        squares = found.square().sum(-1)
        return squares[..., :, None] + squares[..., None, :] - 2 * found @ found.mT

    def loss(self, read: Tensor, part: TreesPart) -> Tensor:
        """Mean over sentences of the mean absolute error over all pairs of words (eq. 3), (A,)."""
        pairs = (part.real[:, :, None] & part.real[:, None]).to(read.dtype)
        errors = (self(read, part) - part.distances).abs() * pairs
        return (errors.sum((-1, -2)) / pairs.sum((-1, -2))).mean(1)


class DepthProbes(StructuralProbes):
    """The squared length |Bᵀh_i|² stands for the depth of a word in the tree (§2.3)."""

    def forward(self, read: Tensor, part: TreesPart) -> Tensor:
        """Predict depths: (A, n, d) -> (A, b, T)."""
        return self.projected(read, part).square().sum(-1)

    def loss(self, read: Tensor, part: TreesPart) -> Tensor:
        """Mean over sentences of the mean absolute error over words, (A,)."""
        real = part.real.to(read.dtype)
        errors = (self(read, part) - part.depths).abs() * real
        return (errors.sum(-1) / real.sum(-1)).mean(1)
