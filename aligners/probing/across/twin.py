"""The causal twin of a probe: Y's answers when the subspace that the probe reads is swapped through a map."""

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
# parts that no probe reads
RANDOM, PRINCIPAL, WHOLE = "random", "principal", "whole state"


Scores = dict[str, Tensor]  # quantity of `BEHAVIOUR` -> its values


class SwappedPart(NamedTuple):
    """A part of the state that is swapped.

    Attributes:
        name: name of the task whose probe reads it, or one of `RANDOM`, `PRINCIPAL`, `WHOLE`.
        subspaces: (S, d, k) a subspace of each site; several such where draws are averaged; None: the whole state.
    """

    name: str
    subspaces: Sequence[Tensor | None]


def parts_of(
    read: Mapping[str, Tensor], states: Tensor, draws: int, seed: int
) -> list[SwappedPart]:
    """Return the parts to swap: subspaces that probes read, as many random and principal dimensions, everything.

    Args:
        read: name of a task -> subspaces (S, d, k) that its probe reads.
        states: (S, N, d) states of Y at its sites.
        draws: number of draws of random dimensions.
        seed: seed of the first draw.
    """
    parts = []
    sizes = dict[int, Tensor]()
    for name, subspaces in read.items():
        parts.append(SwappedPart(name, [subspaces]))
        sizes[subspaces.shape[-1]] = subspaces

    for size, like in sizes.items():
        seeds = range(seed, seed + draws)
        drawn = [random_subspaces(like, each) for each in seeds]
        parts.append(SwappedPart(RANDOM, drawn))
        principal = principal_subspaces(states, size)
        parts.append(SwappedPart(PRINCIPAL, [principal]))
    return [*parts, SwappedPart(WHOLE, [None])]


class Twin(nn.Module):
    """Puts parts of mapped states into Y, and scores its answers text by text.

    Args:
        behaviour: how Y's answers are measured, on the route from X.
        maps: maps whose output takes the place of Y's states: maps of tokens, and the mean, which erases.
        parts: the parts of the state to swap.
        texts: number of held-out texts.
        seed: seed of the resampling of texts.
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
        swaps = len(self.maps) * len(self.parts)
        sites = len(behaviour.route.pairs)
        self.scores = TextScores(BEHAVIOUR, swaps, sites, texts)
        self.native = TextScores(BEHAVIOUR, 1, 1, texts)

    def update(self, task: TaskBatch, own: UnitAnswers) -> None:
        """Swap every part through every map at every site, on one batch.

        Args:
            task: targets of the task; X and Y are read on its inputs.
            own: Y's own answers.
        """
        text = task.texts.text
        route = self.behaviour.route
        native = self.behaviour.without_sites(task, {route.target: own})
        self.native.update(text, native)

        read = read_all([route], task, targets=True)
        x, y = read.sources(route), read.targets(route)
        results = []
        for method in self.maps:
            mapped = method.map(x, task)
            for part in self.parts:
                results.append(self._mean(task, y, mapped, part, own))
        self.scores.update(text, _stacked(results))

    def _mean(
        self,
        task: TaskBatch,
        y: Tensor,
        mapped: Tensor,
        part: SwappedPart,
        own: UnitAnswers,
    ) -> Scores:
        """Measure Y, averaged over subspaces that are drawn alike: quantity -> (S, B)."""
        draws = []
        for subspaces in part.subspaces:
            states = swapped(y, mapped, subspaces)
            draws.append(self.behaviour.injected(task, states, own))
        stacked = _stacked(draws)
        return {name: values.mean(0) for name, values in stacked.items()}

    def _about(self, method: Method, part: SwappedPart, s: int) -> Row:
        """Describe what was swapped, by which map and at which site pair."""
        route = self.behaviour.route
        site_x, site_y = route.pairs[s]
        return {
            "model_x": route.source.name,
            "model_y": route.target.name,
            "site_x": site_x,
            "site_y": site_y,
            "method": method.name,
            "training": method.outcome(s),
            "part": part.name,
            "dimensions": self._dimensions(part),
        }

    def rows(self) -> Iterator[Row]:
        """Return one row for each map, part and site pair."""
        route, asked = self.behaviour.route, self.behaviour.asked
        own = self.native.compute()
        native = {name: values[0, 0] for name, values in own.items()}
        found = behaviour_columns(self.scores.compute(), native, asked, self.seed)
        for swap, (method, part) in enumerate(product(self.maps, self.parts)):
            for s in range(len(route.pairs)):
                row = self._about(method, part, s)
                row["n_texts"] = len(native["units"])
                row["n_units"] = int(native["units"].sum())
                for name in CHANGES:
                    row[name] = finite(found[name][swap, s])
                yield row

    def _dimensions(self, part: SwappedPart) -> int:
        """Return the number of dimensions of a part."""
        subspaces = part.subspaces[0]
        if subspaces is None:
            return self.behaviour.route.target.width
        return subspaces.shape[-1]


def _stacked(results: Sequence[Scores]) -> Scores:
    """Stack each quantity of several results along a new first axis."""
    stacked = {}
    for name in BEHAVIOUR:
        values = [result[name] for result in results]
        stacked[name] = torch.stack(values)
    return stacked


def read_subspaces(bank: Bank) -> Tensor:
    """Return what each probe of a bank reads of its states: the span of its projections, and nothing outside it.

    Args:
        bank: edge probes with a narrow projection, or structural probes of equal rank.

    Returns:
        (A, d, k) with orthonormal columns, float32. The two spans of an edge probe are projected separately, and k is
        then twice the projection's width, at most d.
    """
    if isinstance(bank.probes, StructuralProbes):
        kept = bank.probes.kept[0]
        return _orthonormal(bank.probes.weight[:, :, kept])
    weights = list[Tensor]()
    for projection in cast(EdgeProbes, bank.probes).projections:
        weights.append(projection.get_parameter("weight"))
    weight = torch.cat(weights, -1)
    return _orthonormal(weight)


def random_subspaces(like: Tensor, seed: int) -> Tensor:
    """Draw subspaces of the same dimension, each uniformly: (A, d, k)."""
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.randn(like.shape, generator=draw, dtype=torch.float64)
    return _orthonormal(drawn).to(like)


def principal_subspaces(states: Tensor, k: int) -> Tensor:
    """Return the subspaces in which states vary most: (A, N, d) -> (A, d, k)."""
    exact = states.double()
    centred = exact - exact.mean(1, keepdim=True)
    vectors = torch.linalg.eigh(centred.mT @ centred).eigenvectors
    return vectors[..., -k:].to(states)


def swapped(own: Tensor, other: Tensor, subspaces: Tensor | None) -> Tensor:
    """Replace the part of states in a subspace by that of other states: y + V Vᵀ (g(x) − y).

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
