"""Sends the labels of a task with edge probes, portion by portion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from aligners.probing.bank import Asked, Bank, Examples
from aligners.probing.edges.scores import codelengths
from aligners.probing.edges.targets import Labels, Targets
from aligners.probing.online.codes import PORTIONS, OnlineCode, frequency_bits, portion_ends, uniform_bits
from aligners.probing.training import ProbeTraining, train_bank
from aligners.probing.words import Words

__all__ = ["OfSome", "by_frequencies", "send_labels"]


@dataclass(frozen=True)
class OfSome:
    """What is asked of some sentences alone.

    Attributes:
        asked: of more of them.
        sentences: their numbers, in any order.
    """

    asked: Asked
    sentences: list[int]

    def part(self, words: Words, sentences: Sequence[int]) -> Any:
        """As `Asked.part`."""
        return self.asked.part(words, sentences)


def send_labels(
    fresh: Callable[[int], Bank],
    fitting: Examples,
    watched: Examples,
    labels: Labels,
    how: ProbeTraining,
    seed: int,
    portions: Sequence[float] = PORTIONS,
) -> OnlineCode:
    """Send the labels of all targets, a sentence at a time in an order that the seed draws.

    The receiver knows the number of labels, the sentences themselves, and the labels that are watched. All probes of a
    bank are trained on, and send, the same sentences; an arm with a control task sends its labels.

    Args:
        fresh: makes an untrained bank from a seed.
        fitting: words, and the `Targets` that are sent, all of whose labels are known.
        watched: those of other sentences, which both sides know and nobody trains on: they say when a probe has
            learned enough.
        labels: of the task.
        how: each bank is trained.
        seed: of the order, the weights and the training.
        portions: see `portion_ends`.

    Raises:
        ValueError: too few sentences, or as `train_bank` does.
    """
    words, targets = fitting.words, cast(Targets, fitting.asked)
    draw = torch.Generator().manual_seed(seed)
    found = torch.tensor(targets.sentences)
    order = found[torch.randperm(len(found), generator=draw)].tolist()
    ends = portion_ends(len(order), portions)
    sent, unfinished = [], 0
    for first, end in pairwise(ends):
        bank = fresh(seed)
        train_bank(bank, Examples(words, OfSome(targets, sorted(order[:first]))), watched, how, seed)
        unfinished += len(bank.unfinished)
        sent.append(_bits(bank, words, targets, order[first:end]))
    counts = targets.first.diff()[order]
    units = torch.tensor(order)
    uniform = counts * uniform_bits(len(labels.names), several=labels.several)
    return replace(OnlineCode.of(ends, units, sent, uniform, counts), unfinished=unfinished)


def _bits(bank: Bank, words: Words, targets: Targets, sentences: list[int]) -> Tensor:
    """Bits of all labels of each sentence, (A, sentences)."""
    each = codelengths(bank, words, OfSome(targets, sentences))
    owner = torch.arange(len(sentences)).repeat_interleave(targets.first.diff()[sentences])
    return each.new_zeros(len(each), len(sentences)).index_add_(1, owner, each)


def by_frequencies(targets: Targets, labels: Labels, *, control: bool) -> float:
    """Bits of all labels by a code that counts them as they come, and reads no states."""
    return frequency_bits(targets.labels[int(control)], several=labels.several)
