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
from aligners.probing.probe_bank import Numbers, Words, numbers_within

Names = tuple[str, ...]
Span = tuple[int, int]  # number of its first word, and of the word after its last


@dataclass(frozen=True)
class Labels:
    """The labels of a task, as the fitting sentences have them.

    Attributes:
        task: name of the task.
        names: K labels, the most frequent first.
        several: whether a target may have several labels, or none.
        spans: number of spans of each target, 1 or 2.
        sets: every combination of labels that a target has, and how many targets have it, the most frequent first.
    """

    task: str
    names: Names
    several: bool
    spans: int
    sets: tuple[tuple[Names, int], ...]

    @classmethod
    def of(cls, task: str, sentences: Sequence[Sentence]) -> Self:
        """Collect the labels of a task.

        Raises:
            ValueError: no sentence has a target of the task, only some targets have a second span, or all targets have
                the same labels.
        """
        names = Counter[str]()
        sets = Counter[Names]()
        spans = set[int]()
        for _, target in _of_task(task, sentences):
            names.update(target.labels)
            together = tuple(sorted(target.labels))
            sets[together] += 1
            spans.add(len(_spans_of(target)))

        if not sets:
            known = ", ".join(tasks_of(sentences)) or "none"
            raise UserError(
                f"Expected `tasks` that the fitting sentences have, but got {task!r}; they have: {known}."
            )
        if len(spans) > 1:
            raise UserError(
                f"Expected every target of {task!r} to have `span2`, or none, but only some have."
            )
        if len(sets) < 2:
            raise UserError(
                f"Expected targets of {task!r} to differ, but all have the labels {next(iter(sets))}."
            )
        return cls(
            task=task,
            names=tuple(name for name, _ in _by_frequency(names)),
            several=set(map(len, sets)) != {1},
            spans=spans.pop(),
            sets=tuple(_by_frequency(sets)),
        )

    @property
    def shape(self) -> dict[str, Any]:
        """The options of probes that follow from the labels."""
        return {"labels": len(self.names), "spans": self.spans, "several": self.several}

    def multi_hot(self, labels: Sequence[str]) -> Tensor:
        """Return which labels are given, (K,) bool. Unknown ones are left out."""
        given = [name in labels for name in self.names]
        return torch.tensor(given)

    def drawn(self, words: str, seed: int) -> Names:
        """Return the labels that a control task gives to these words, wherever they occur.

        They depend on the words and the seed alone, and are as frequent as in the task: a probe can only memorise them.

        References:
            Hewitt and Liang 2019, "Designing and interpreting probes with control tasks", EMNLP, §2.
        """
        counts = [count for _, count in self.sets]
        ends = list(accumulate(counts))
        written = f"{seed} {words}".encode()
        digest = blake2b(written, digest_size=8).digest()
        place = int.from_bytes(digest, "big") % ends[-1]
        names, _ = self.sets[bisect_right(ends, place)]
        return names


def _by_frequency(counts: Counter[Any]) -> list[tuple[Any, int]]:
    """Sort by frequency, highest first; by name where counts are equal."""
    by_name = sorted(counts.items())
    return sorted(by_name, key=lambda entry: -entry[1])


@dataclass(frozen=True)
class Targets:
    """T targets of a task, in the order of the sentences.

    Attributes:
        spans: (T, S, 2) first word of each span and the word after its last, within the sentence; in a `part`, the
            rows.
        labels: (2, T, K) bool, labels of the task and of its control task.
        sentence: (T,) number of the sentence among those of `Words`, on the CPU.
        unknown: (T,) number of labels that do not occur in fitting, which no probe can give, on the CPU.
        count: B, number of sentences, including those without a target.
    """

    spans: Tensor
    labels: Tensor
    sentence: Tensor
    unknown: Tensor
    count: int

    @cached_property
    def first(self) -> Tensor:
        """Number of each sentence's first target, (B + 1,); the last entry is T."""
        numbers = torch.arange(self.count + 1)
        return torch.searchsorted(self.sentence, numbers)

    def __len__(self) -> int:
        """T, the number of targets."""
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

    def part(self, words: Words, sentences: Numbers) -> Self:
        """Return the targets of some sentences, whose rows are counted from 0, on the device of the states."""
        index = numbers_within(self.first, sentences)
        some = self._at(index)
        counts = self.first.diff()[list(sentences)]
        starts = words.starts(sentences).repeat_interleave(counts)
        spans = some.spans + starts[:, None, None]
        device = words.states.device
        own = some.labels.to(device)
        return replace(some, spans=spans.to(device), labels=own)

    def _at(self, index: Tensor) -> Self:
        return replace(
            self,
            spans=self.spans[index],
            labels=self.labels[:, index],
            sentence=self.sentence[index],
            unknown=self.unknown[index],
        )


def tasks_of(sentences: Sequence[Sentence]) -> list[str]:
    """Return the names of the tasks that sentences have targets of, in order."""
    names = dict[str, None]()
    for sentence in sentences:
        for target in sentence.targets:
            names[target.task] = None
    return list(names)


def targets_of(labels: Labels, words: Words, seed: int = 0) -> Targets:
    """Return the targets of a task.

    Args:
        labels: labels of the fitting sentences.
        words: the sentences and their rows, for fitting or otherwise.
        seed: seed of the control task.

    Raises:
        ValueError: a span is not within its sentence, or a target has not `labels.spans` spans.
    """
    spans, own, control, sentence, unknown = [], [], [], [], []
    for number, target in _of_task(labels.task, words.sentences):
        strings = words.sentences[number].words
        given = _checked_spans(target, labels, len(strings))
        covered = _words_in(given, strings)

        spans.append(given)
        own.append(target.labels)
        control.append(labels.drawn(covered, seed))
        sentence.append(number)
        unknown.append(len({*target.labels} - {*labels.names}))

    given_labels = [_multi_hot(labels, own), _multi_hot(labels, control)]
    return Targets(
        spans=_integers(spans).view(-1, labels.spans, 2),
        labels=torch.stack(given_labels),
        sentence=_integers(sentence),
        unknown=_integers(unknown),
        count=len(words.sentences),
    )


def _words_in(spans: Sequence[Span], words: Sequence[str]) -> str:
    """Return the words of some spans, as one string."""
    parts = [" ".join(words[first:end]) for first, end in spans]
    return "\t".join(parts)


def _integers(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _multi_hot(labels: Labels, sets: Sequence[Names]) -> Tensor:
    """Return the labels of each of T sets, most of which are equal: (T, K) bool."""
    hot = torch.zeros(len(sets), len(labels.names), dtype=torch.bool)
    known = {names: labels.multi_hot(names) for names in set(sets)}
    for number, names in enumerate(sets):
        hot[number] = known[names]
    return hot


def _spans_of(target: Target) -> list[Span]:
    """Return the one or two spans of a target."""
    if target.span2:
        return [target.span1, target.span2]
    return [target.span1]


def _checked_spans(target: Target, labels: Labels, words: int) -> list[Span]:
    """Return the spans of a target; raise unless there are `labels.spans`, within a sentence of so many words."""
    spans = _spans_of(target)
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
    """Return the targets of a task, each with the number of its sentence."""
    for number, sentence in enumerate(sentences):
        for target in sentence.targets:
            if target.task == task:
                yield number, target
