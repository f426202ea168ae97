"""How well edge probes answer."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from aligners.probing.bank import Asked, Bank, answers
from aligners.probing.edges.probes import EdgeProbes
from aligners.probing.edges.targets import Labels, Targets
from aligners.probing.words import Words

__all__ = ["accuracy", "codelengths", "counts", "counts_of", "f1", "given_labels", "majority"]


def given_labels(logits: Tensor, several: bool) -> Tensor:
    """The labels that a probe gives, (A, T, K) bool: the most likely one, or all that are more likely than not."""
    if several:
        return logits > 0
    return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).bool()


def counts(bank: Bank, words: Words, targets: Targets) -> Tensor:
    """What `counts_of` counts of a bank's answers: (A, B, 4) float64 on the CPU."""
    probes = cast(EdgeProbes, bank.probes)
    total = torch.zeros(len(bank.arms), targets.count, 4, dtype=torch.float64)
    for part, logits in answers(bank, words, targets):
        found = counts_of(given_labels(logits, probes.several), probes.asked(part)).cpu()
        unknown = part.unknown * (1 - probes.control.cpu())[:, None]
        found = torch.stack([*found[..., :2].unbind(-1), found[..., 2] + unknown, found[..., 3] * (unknown == 0)], -1)
        total.index_add_(1, part.sentence, found.double())
    return total


def counts_of(given: Tensor, true: Tensor) -> Tensor:
    """For each target the labels given rightly, given, and true, and whether all are right: (A, T, 4).

    Args:
        given: (A, T, K) bool.
        true: (A, T, K) bool.
    """
    right = (given & true).sum(-1)
    return torch.stack([right, given.sum(-1), true.sum(-1), (given == true).all(-1)], -1)


def f1(found: Tensor) -> Tensor:
    """Micro-averaged F1 of `counts` that were added up, (..., 4) -> (...); accuracy where each target has one label."""
    right, given, true, _ = found.unbind(-1)
    return 2 * right / (given + true)


def accuracy(found: Tensor, targets: int) -> Tensor:
    """Share of the targets whose labels are all right, from `counts` that were added up: (..., 4) -> (...)."""
    return found[..., 3] / targets


def majority(labels: Labels, targets: Targets) -> Tensor:
    """What `counts` would count if every target got the most frequent labels of fitting: (1, B, 4)."""
    given = labels.multi_hot(labels.sets[0][0]).expand(1, len(targets), -1)
    found = counts_of(given, targets.labels[:1])
    unknown = targets.unknown[None]
    found = torch.stack([*found[..., :2].unbind(-1), found[..., 2] + unknown, found[..., 3] * (unknown == 0)], -1)
    return torch.zeros(1, targets.count, 4, dtype=torch.float64).index_add_(1, targets.sentence, found.double())


def codelengths(bank: Bank, words: Words, targets: Asked) -> Tensor:
    """Bits that each arm needs to send the labels of each target, (A, T) float64 on the CPU.

    Infinite for a label that fitting has not seen, where a target has one label.
    """
    probes = cast(EdgeProbes, bank.probes)
    found = [probes.surprise(logits.double(), part).cpu() for part, logits in answers(bank, words, targets)]
    return torch.cat(found, 1) / math.log(2)
