"""The causal twin of a probe: what Y answers when the subspace that the probe reads is swapped through a map."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from aligners.datamodules.task_targets import TaskBatch
from aligners.errors import finite
from aligners.injection.behaviour import (
    BEHAVIOUR,
    Behaviour,
    behaviour_columns,
    read_all,
)
from aligners.injection.methods import Method
from aligners.injection.scoring.scores import Row, TextScores
from aligners.injection.scoring.task_scores import UnitAnswers
from aligners.probing.probe_bank import Bank
from aligners.probing.probes import EdgeProbes, StructuralProbes

CHANGES = (
    *("penalty", "penalty_low", "penalty_high", "loss"),
    *("accuracy", "accuracy_low", "accuracy_high", "agreement"),
)
RANDOM, PRINCIPAL, WHOLE = (
    "random",
    "principal",
    "whole state",
)  # parts that no probe reads


class SwappedPart(NamedTuple):
    """A part of the state that is swapped.

    Attributes:
        name: of the task whose probe reads it, or one of `RANDOM`, `PRINCIPAL`, `WHOLE`.
        subspaces: of each site (S, d, k), several where an average over draws is wanted; None for the whole state.
    """

    name: str
    subspaces: Sequence[Tensor | None]


def parts_of(
    read: Mapping[str, Tensor], states: Tensor, draws: int, seed: int
) -> list[SwappedPart]:
    """The parts that are swapped: subspaces that probes read, equally many random and principal dimensions, and all.

    Args:
        read: name of a task -> subspaces (S, d, k).
        states: (S, N, d) of Y, at its sites.
        draws: of random dimensions.
        seed: of the first draw.
    """
    parts = [SwappedPart(name, [subspaces]) for name, subspaces in read.items()]
    sizes = {subspaces.shape: subspaces for subspaces in read.values()}
    for like in sizes.values():
        drawn = [random_subspaces(like, seed + draw) for draw in range(draws)]
        parts.append(SwappedPart(RANDOM, drawn))
        parts.append(
            SwappedPart(PRINCIPAL, [principal_subspaces(states, like.shape[-1])])
        )
    return [*parts, SwappedPart(WHOLE, [None])]


class Twin(nn.Module):
    """Puts parts of mapped states into Y, and scores its answers text by text.

    Args:
        behaviour: of Y, on the route from X.
        maps: what takes the place of Y's states: maps of tokens, and their mean, which erases what was there.
        parts: of the state.
        texts: number of held-out texts.
        seed: of the resampling of texts.
    """

    def __init__(
        self,
        behaviour: Behaviour,
        maps: Sequence[Method],
        parts: Sequence[SwappedPart],
        texts: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.behaviour = behaviour
        self.maps = list(maps)
        self.parts = list(parts)
        self.seed = seed
        swaps, sites = len(self.maps) * len(self.parts), len(behaviour.route.pairs)
        self.scores = TextScores(BEHAVIOUR, swaps, sites, texts)
        self.native = TextScores(BEHAVIOUR, 1, 1, texts)

    def update(self, task: TaskBatch, own: UnitAnswers) -> None:
        """Swap every part through every map at every site, on one batch.

        Args:
            task: what is asked; X and Y are read on its inputs.
            own: what Y answers by itself.
        """
        route, text = self.behaviour.route, task.texts.text
        read = read_all([route], task, targets=True)
        x, y = read.sources(route), read.targets(route)
        self.native.update(
            text, self.behaviour.without_sites(task, {route.target: own})
        )
        results = []
        for method in self.maps:
            mapped = method.map(x, task)
            for part in self.parts:
                results.append(self._mean(task, y, mapped, part, own))
        stacked = {
            name: torch.stack([result[name] for result in results])
            for name in BEHAVIOUR
        }
        self.scores.update(text, stacked)

    def _mean(
        self,
        task: TaskBatch,
        y: Tensor,
        mapped: Tensor,
        part: SwappedPart,
        own: UnitAnswers,
    ) -> dict[str, Tensor]:
        """What Y does, averaged over subspaces that are drawn alike: quantity -> (S, B)."""
        draws = []
        for subspaces in part.subspaces:
            draws.append(
                self.behaviour.injected(task, swapped(y, mapped, subspaces), own)
            )
        return {
            name: torch.stack([draw[name] for draw in draws]).mean(0)
            for name in BEHAVIOUR
        }

    def rows(self) -> Iterator[Row]:
        """One row for each map, part and site pair."""
        route = self.behaviour.route
        native = {name: values[0, 0] for name, values in self.native.compute().items()}
        columns = behaviour_columns(
            self.scores.compute(), native, self.behaviour.asked, self.seed
        )
        for swap, (method, part) in enumerate(product(self.maps, self.parts)):
            subspace = part.subspaces[0]
            dimensions = route.target.width if subspace is None else subspace.shape[-1]
            for s, (site_x, site_y) in enumerate(route.pairs):
                yield {
                    "model_x": route.source.name,
                    "model_y": route.target.name,
                    "site_x": site_x,
                    "site_y": site_y,
                    "method": method.name,
                    "training": method.outcome(s),
                    "part": part.name,
                    "dimensions": dimensions,
                    "n_texts": len(native["units"]),
                    "n_units": int(native["units"].sum()),
                    **{name: finite(columns[name][swap, s]) for name in CHANGES},
                }


def read_subspaces(bank: Bank) -> Tensor:
    """What each probe of a bank reads of its states: the span of its projections, and nothing outside it.

    Args:
        bank: of edge probes with a narrow projection, or of structural probes of equal rank.

    Returns:
        (A, d, k) with orthonormal columns, float32. The two spans of an edge probe are projected separately, and k is
        then twice the projection's width, at most d.
    """
    if isinstance(bank.probes, EdgeProbes):
        weights = [
            cast(Tensor, projection.weight) for projection in bank.probes.projections
        ]
        weight = torch.cat(weights, -1)
    else:
        probes = cast(StructuralProbes, bank.probes)
        weight = probes.weight[:, :, probes.kept[0]]
    return _orthonormal(weight)


def random_subspaces(like: Tensor, seed: int) -> Tensor:
    """Subspaces of the same dimension, each drawn uniformly: (A, d, k)."""
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.randn(like.shape, generator=draw, dtype=torch.float64)
    return _orthonormal(drawn).to(like)


def principal_subspaces(states: Tensor, k: int) -> Tensor:
    """Where states vary most: (A, N, d) -> (A, d, k)."""
    centred = states.double() - states.double().mean(1, keepdim=True)
    vectors = torch.linalg.eigh(centred.mT @ centred).eigenvectors
    return vectors[..., -k:].to(states)


def swapped(own: Tensor, other: Tensor, subspaces: Tensor | None) -> Tensor:
    """States with their part in a subspace replaced by that of others: y + V Vᵀ (g(x) − y).

    Args:
        own: (S, N, d) the states y.
        other: (S, N, d) what replaces them, g(x).
        subspaces: (S, d, k) with orthonormal columns V; None: everything is replaced.

    Returns:
        (S, N, d)
    """
    if subspaces is None:
        return other
    return own + (other - own) @ subspaces @ subspaces.mT


def _orthonormal(columns: Tensor) -> Tensor:
    return torch.linalg.qr(columns.double()).Q.to(columns)
