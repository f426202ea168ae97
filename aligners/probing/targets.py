"""Labelled spans: the labels of a task, and its targets among words, with those of the control task."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from aligners.datamodules.text.annotated.sentence import Sentence, Target
from aligners.errors import UserError
from aligners.probing.probe_bank import Words, numbers_within


@dataclass(frozen=True)
class Labels:
    """The labels of a task, as the fitting sentences have them.

    Attributes:
        task: its name.
        names: K labels, the most frequent first.
        several: whether a span may have several labels, or none.
        spans: 1 or 2, of a target.
        sets: every combination of labels that a target has, and how many targets have it, the most frequent first.
    """

    task: str
    names: tuple[str, ...]
    several: bool
    spans: int
    sets: tuple[tuple[tuple[str, ...], int], ...]

    @classmethod
    def of(cls, task: str, sentences: Sequence[Sentence]) -> Self:
        """The labels of a task.

        Raises:
            ValueError: no sentence has a target of it, only some targets have a second span, or all have one label.
        """
        names, sets, spans = Counter[str](), Counter[tuple[str, ...]](), Counter[int]()
        for _, target in _of_task(task, sentences):
            names.update(target.labels)
            sets[tuple(sorted(target.labels))] += 1
            spans[2 if target.span2 else 1] += 1

        if not sets:
            known = ", ".join(tasks_of(sentences)) or "none"
            raise UserError(
                f"Expected `tasks` that the fitting sentences have, but got {task!r}; there are: {known}."
            )
        if len(spans) > 1:
            raise UserError(
                f"Expected every target of {task!r} to have `span2`, or none, but only some have."
            )
        if len(sets) < 2:
            raise UserError(
                f"Expected targets of {task!r} to differ, but all have the labels {next(iter(sets))}."
            )
        several = any(len(labels) != 1 for labels in sets)
        ordered = tuple(name for name, _ in _by_frequency(names))
        return cls(
            task, ordered, several, next(iter(spans)), tuple(_by_frequency(sets))
        )

    @property
    def shape(self) -> dict[str, Any]:
        """The options of probes that follow from the labels."""
        return {"labels": len(self.names), "spans": self.spans, "several": self.several}

    def multi_hot(self, labels: Sequence[str]) -> Tensor:
        """(K,) bool: which labels are given. Unknown ones are left out."""
        return torch.tensor([name in labels for name in self.names])

    def drawn(self, words: str, seed: int) -> tuple[str, ...]:
        """The labels that a control task gives to these words, wherever they stand.

        They follow from the words and the seed alone, and are as frequent as in the task, so that what a probe learns
        of them it has remembered.

        References:
            Hewitt and Liang 2019, "Designing and interpreting probes with control tasks", EMNLP, §2.
        """
        ends = list(accumulate(count for _, count in self.sets))
        digest = blake2b(f"{seed} {words}".encode(), digest_size=8).digest()
        place = int.from_bytes(digest, "big") % ends[-1]
        return self.sets[bisect_right(ends, place)][0]


def _by_frequency(counts: Counter[Any]) -> list[tuple[Any, int]]:
    """Most frequent first; in the order of the names where counts are equal."""
    return sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))


@dataclass(frozen=True)
class Targets:
    """T targets of a task, in the order of the sentences.

    Attributes:
        spans: (T, S, 2), first word and word after the last of each span, within the sentence; of a `part` the rows.
        labels: (2, T, K) bool, of the task and of its control task.
        sentence: (T,) number of the sentence among those of `Words`, on the CPU.
        unknown: (T,) number of labels that do not occur in fitting, and that no probe can give, on the CPU.
        count: B, of sentences, including those without a target.
    """

    spans: Tensor
    labels: Tensor
    sentence: Tensor
    unknown: Tensor
    count: int

    @cached_property
    def first(self) -> Tensor:
        """(B + 1,) number of each sentence's first target; the last entry is T."""
        return torch.searchsorted(self.sentence, torch.arange(self.count + 1))

    def __len__(self) -> int:
        """T."""
        return len(self.sentence)

    @property
    def sentences(self) -> list[int]:
        """Numbers of the sentences that have a target."""
        return self.sentence.unique().tolist()

    def only(self, chosen: Tensor) -> Self:
        """Some of the targets, in the same order.

        Args:
            chosen: (T,) bool.
        """
        return self._at(chosen.nonzero()[:, 0])

    def part(self, words: Words, sentences: Sequence[int]) -> Self:
        """The targets of some sentences, whose rows are counted from 0, on the device of the states."""
        some = self._at(numbers_within(self.first, sentences))
        counts = self.first.diff()[list(sentences)]
        starts = words.starts(sentences).repeat_interleave(counts)
        spans = some.spans + starts[:, None, None]
        device = words.states.device
        return replace(some, spans=spans.to(device), labels=some.labels.to(device))

    def _at(self, index: Tensor) -> Self:
        return replace(
            self,
            spans=self.spans[index],
            labels=self.labels[:, index],
            sentence=self.sentence[index],
            unknown=self.unknown[index],
        )


def tasks_of(sentences: Sequence[Sentence]) -> list[str]:
    """The names of the tasks that sentences have targets of, in order."""
    names = dict[str, None]()
    for sentence in sentences:
        names.update(dict.fromkeys(target.task for target in sentence.targets))
    return list(names)


def targets_of(labels: Labels, words: Words, seed: int = 0) -> Targets:
    """The targets of a task.

    Args:
        labels: of the fitting sentences.
        words: the sentences and their rows, fitting ones or others.
        seed: of the control task.

    Raises:
        ValueError: a span is not within its sentence, or there are other than `labels.spans` spans.
    """
    spans, own, control, sentence, unknown = [], [], [], [], []
    for number, target in _of_task(labels.task, words.sentences):
        strings = words.sentences[number].words
        given = _spans(target, labels, len(strings))
        covered = "\t".join(" ".join(strings[first:end]) for first, end in given)
        spans.append(given)
        own.append(target.labels)
        control.append(labels.drawn(covered, seed))
        sentence.append(number)
        unknown.append(len(set(target.labels) - set(labels.names)))

    return Targets(
        torch.tensor(spans, dtype=torch.int64).view(-1, labels.spans, 2),
        torch.stack([_multi_hot(labels, own), _multi_hot(labels, control)]),
        torch.tensor(sentence, dtype=torch.int64),
        torch.tensor(unknown, dtype=torch.int64),
        len(words.sentences),
    )


def _multi_hot(labels: Labels, sets: Sequence[tuple[str, ...]]) -> Tensor:
    """(T, K) bool: the labels of each of T sets, of which few differ."""
    if not sets:
        return torch.zeros(0, len(labels.names), dtype=torch.bool)
    rows = {names: labels.multi_hot(names) for names in set(sets)}
    return torch.stack([rows[names] for names in sets])


def _spans(target: Target, labels: Labels, words: int) -> list[tuple[int, int]]:
    spans = [target.span1]
    if target.span2:
        spans.append(target.span2)
    if len(spans) != labels.spans:
        raise UserError(
            f"Expected {labels.spans} spans of every target of {labels.task!r}, but got {len(spans)}."
        )
    for first, end in spans:
        if not 0 <= first < end <= words:
            raise UserError(
                f"Expected spans of {labels.task!r} within the {words} words of their sentence, but got "
                f"({first}, {end})."
            )
    return spans


def _of_task(task: str, sentences: Sequence[Sentence]) -> Iterator[tuple[int, Target]]:
    for number, sentence in enumerate(sentences):
        for target in sentence.targets:
            if target.task == task:
                yield number, target
