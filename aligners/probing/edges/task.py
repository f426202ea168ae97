"""A task of labelled spans: its bank, and what the report says of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from aligners.probing.arms import Arm
from aligners.probing.bank import Bank, Examples
from aligners.probing.edges.probes import edge_bank
from aligners.probing.edges.scores import accuracy, counts, f1, majority
from aligners.probing.edges.targets import Labels, Targets, targets_of
from aligners.probing.rows import Row, draws, parameters_of, row_of, score_columns
from aligners.probing.training import ProbeTraining, train_bank
from aligners.probing.words import Words

__all__ = ["EdgeTask"]


@dataclass
class EdgeTask:
    """A task of labelled spans, on the fitting words of a model.

    Args:
        name: of the task.
        words: the fitting words.
        watched: the validation words.
        arms: of the bank.
        sizes: `projection` and `hidden` of the probes.
        seed: of the control task.
    """

    name: str
    words: Words
    watched: Words
    arms: Sequence[Arm]
    sizes: dict[str, int]
    seed: int
    labels: Labels = field(init=False)
    targets: Targets = field(init=False)

    def __post_init__(self) -> None:
        self.labels = Labels.of(self.name, self.words.sentences)
        self.targets = targets_of(self.labels, self.words, self.seed)

    def train(self, how: ProbeTraining, seed: int) -> Bank:
        """Train a fresh bank on all fitting words."""
        bank = edge_bank(self.arms, self.words, self.labels, seed, **self.sizes)
        train_bank(bank, Examples(self.words, self.targets), self.validation(), how, seed)
        return bank

    def validation(self) -> Examples:
        """The targets of the validation words whose labels fitting has seen."""
        targets = targets_of(self.labels, self.watched, self.seed)
        return Examples(self.watched, targets.only(targets.unknown == 0))

    def about(self) -> dict[str, Any]:
        """What is kept beside a bank, as plain values."""
        return {"task": self.name, "labels": asdict(self.labels), "control_seed": self.seed}

    def rows(self, banks: Sequence[Bank], held: Words) -> Iterator[Row]:
        """Rows of the report: one for each arm that is not a control, and one of the most frequent labels.

        Args:
            banks: one of each seed.
            held: held-out words.
        """
        targets = targets_of(self.labels, held, self.seed)
        found = torch.stack([counts(bank, held, targets) for bank in banks])
        weights = draws(targets.count, self.seed)
        about: dict[str, Any] = {
            "task": self.name,
            "probe": "edge",
            "n_sentences": len(targets.sentences),
            "n_targets": len(targets),
            "n_unknown": int(targets.unknown.sum()),
        }
        least = majority(self.labels, targets)
        yield row_of(
            "majority", None, **about, accuracy=accuracy(least.sum(1), len(targets))[0], **_scored(least, weights)
        )
        size = parameters_of(banks[0].probes.parameters(), len(self.arms))
        for a, arm in enumerate(self.arms):
            if not arm.control:
                own = {**_scored(found[:, a], weights), **self._selectivity(found, a, weights)}
                right = accuracy(found[:, a].sum((0, 1)), len(targets) * len(banks))
                mixed = {"centre_of_gravity": centre_of_gravity(banks, a)} if arm.layer is None else {}
                yield row_of(arm.source, arm, **about, **own, **mixed, accuracy=right, parameters=size)

    def _selectivity(self, found: Tensor, a: int, weights: Tensor) -> dict[str, Tensor]:
        """How much better an arm is than the arm that is asked the control task, if there is one."""
        other = self.arms[a]._replace(control=True)
        if other not in self.arms:
            return {}
        pair = [found[:, place].sum(0) for place in (a, self.arms.index(other))]
        own, control = (f1(each.sum(0)) for each in pair)
        drawn, drawn_control = (f1(weights @ each.flatten(1)) for each in pair)
        return {"control": control, **score_columns("selectivity", own - control, drawn - drawn_control)}


def _scored(found: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """F1 of counts (S, B, 4), with its intervals."""
    return score_columns("score", f1(found.sum((0, 1))), f1(weights @ found.sum(0)), f1(found.sum(1)))


def centre_of_gravity(banks: Sequence[Bank], arm: int) -> float:
    """The layer that a mix reads on average, Σ_l l · weight_l, mean over seeds (Tenney et al. 2019b, §3.2)."""
    layers = torch.tensor([float(place.layer) for place in banks[0].places])
    return float(torch.stack([bank.readings.weights()[arm].cpu() for bank in banks]).mean(0) @ layers)
