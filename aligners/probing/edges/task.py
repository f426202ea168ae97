"""A task of labelled spans: its bank, and what the report says of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from aligners.probing.bank import Bank, Examples, answers, fresh_bank
from aligners.probing.edges.probes import EdgeProbes
from aligners.probing.edges.targets import Labels, Targets, targets_of
from aligners.probing.tasks import Row, Task, score_columns
from aligners.probing.words import Words


@dataclass
class EdgeTask(Task):
    """A task of labelled spans, with its labels on the fitting words."""

    labels: Labels = field(init=False)
    baseline = "majority"

    def __post_init__(self) -> None:
        self.labels = Labels.of(self.name, self.words.sentences)
        super().__post_init__()

    def annotations(self, words: Words) -> Targets:
        """The targets of words."""
        return targets_of(self.labels, words, self.seed)

    def validation(self) -> Examples:
        """The targets of the validation words whose labels fitting has seen."""
        targets = self.annotations(self.watched)
        return Examples(self.watched, targets.only(targets.unknown == 0))

    def fresh(self, seed: int) -> Bank:
        """Make an untrained bank."""
        return fresh_bank(EdgeProbes, self.arms, self.words, seed, **self.labels.shape, **self.sizes)

    def about(self) -> dict[str, Any]:
        """What is kept beside a bank, as plain values."""
        return {"task": self.name, "labels": asdict(self.labels), "control_seed": self.seed}

    def scores(self, bank: Bank | None, held: Words) -> EdgeScores:
        """As `Task.scores`; the baseline gives the most frequent labels."""
        targets = self.annotations(held)
        found = majority(self.labels, targets) if bank is None else counts(bank, Examples(held, targets))
        return EdgeScores(found, targets)

    def columns(self, scores: Sequence[EdgeScores], arm: int, weights: Tensor, banks: Sequence[Bank]) -> Row:
        """As `Task.columns`, with the selectivity where another arm is trained on the control task."""
        every = torch.stack([each.counts for each in scores])
        found, targets = every[:, arm], len(scores[0].targets)
        row: Row = score_columns("score", f1(found.sum((0, 1))), f1(weights @ found.sum(0)), f1(found.sum(1)))
        row["accuracy"] = accuracy(found.sum((0, 1)), targets * len(scores))
        if banks:
            row["parameters"] = sum(weight.numel() for weight in banks[0].probes.parameters()) // len(self.arms)
            if self.arms[arm].layer is None:
                row["centre_of_gravity"] = centre_of_gravity(banks, arm)
            control = self.arms[arm]._replace(control=True)
            if control in self.arms:
                row |= _selectivity(found.sum(0), every[:, self.arms.index(control)].sum(0), weights)
        return row


def _selectivity(counts: Tensor, control: Tensor, weights: Tensor) -> Row:
    """How much better an arm is than the arm with the control task, from their counts (B, 4)."""
    (own, drawn), (other, drawn_other) = ((f1(each.sum(0)), f1(weights @ each)) for each in (counts, control))
    return {"control": other, **score_columns("selectivity", own - other, drawn - drawn_other)}


def centre_of_gravity(banks: Sequence[Bank], arm: int) -> float:
    """The layer that a mix reads on average, Σ_l l · weight_l, mean over seeds (Tenney et al. 2019b, §3.2)."""
    layers = torch.tensor([float(place.layer) for place in banks[0].places])
    return float(torch.stack([bank.readings.weights()[arm].cpu() for bank in banks]).mean(0) @ layers)


class EdgeScores(NamedTuple):
    """Of each of A probes and each of B sentences, over its targets, float64 on the CPU.

    Attributes:
        counts: (A, B, 4) labels given rightly, given, and true; targets whose labels are all right.
        targets: of all sentences.
    """

    counts: Tensor
    targets: Targets

    @property
    def sentences(self) -> int:
        """B."""
        return self.targets.count

    @property
    def about(self) -> Row:
        """As `Scores.about`."""
        targets = self.targets
        known = {"n_sentences": len(targets.sentences), "n_targets": len(targets)}
        return {"probe": "edge", **known, "n_unknown": int(targets.unknown.sum())}

    def measures(self, weights: Tensor) -> dict[str, Tensor]:
        """As `Scores.measures`."""
        return {"F1": f1(weights @ self.counts)}


def counts(bank: Bank, examples: Examples) -> Tensor:
    """`EdgeScores.counts` of a bank: it gives the most likely label, or all that are more likely than not."""
    probes, targets = cast(EdgeProbes, bank.probes), cast(Targets, examples.annotations)
    found = torch.zeros(len(bank.arms), targets.count, 4, dtype=torch.float64)
    for part, logits in answers(bank, examples):
        best = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).bool()
        given, unknown = logits > 0 if probes.several else best, part.unknown * (1 - probes.control.cpu())[:, None]
        found.index_add_(1, part.sentence, _of_targets(given, probes.asked(part), unknown))
    return found


def majority(labels: Labels, targets: Targets) -> Tensor:
    """`EdgeScores.counts` of the most frequent labels of fitting, given to every target: (1, B, 4)."""
    given = labels.multi_hot(labels.sets[0][0]).expand(1, len(targets), -1)
    found = torch.zeros(1, targets.count, 4, dtype=torch.float64)
    return found.index_add_(1, targets.sentence, _of_targets(given, targets.labels[:1], targets.unknown[None]))


def _of_targets(given: Tensor, true: Tensor, unknown: Tensor) -> Tensor:
    """Counts of each target, (A, T, 4): given and true are (A, T, K) bool, to which `unknown` (A, T) true ones come."""
    right, exact = (given & true).sum(-1).cpu(), (given == true).all(-1).cpu() & (unknown == 0)
    return torch.stack([right, given.sum(-1).cpu(), true.sum(-1).cpu() + unknown, exact], -1).double()


def f1(counts: Tensor) -> Tensor:
    """Micro-averaged F1 of counts that were added up, (..., 4) -> (...); accuracy where each target has one label."""
    right, given, true, _ = counts.unbind(-1)
    return 2 * right / (given + true)


def accuracy(counts: Tensor, targets: int) -> Tensor:
    """Share of the targets whose labels are all right, of counts that were added up: (..., 4) -> (...)."""
    return counts[..., 3] / targets


def codelengths(bank: Bank, examples: Examples) -> Tensor:
    """Bits that each arm needs to send the labels of each target, (A, T) float64 on the CPU.

    Infinite for a label that fitting has not seen, where a target has one label.
    """
    probes = cast(EdgeProbes, bank.probes)
    found = [probes.surprise(logits.double(), part).cpu() for part, logits in answers(bank, examples)]
    return torch.cat(found, 1) / math.log(2)
