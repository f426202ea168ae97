"""Edge probes: what can be read off the states of a span of words, or of two; their labels, and the report's rows."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from aligners.errors import UserError
from aligners.maps.base import BankLinear
from aligners.probing.bank import Arm, Bank, Examples, Probes, Words, answers, fresh_bank, numbers_within
from aligners.probing.tasks import Row, Task, score_columns
from datamodules.text.annotated.sentence import Sentence, Target


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
        targets = [target for _, target in _of_task(task, sentences)]
        if not targets:
            known = ", ".join(tasks_of(sentences)) or "none"
            raise UserError(f"Expected `tasks` that the fitting sentences have, but got {task!r}; there are: {known}.")
        spans = {2 if target.span2 else 1 for target in targets}
        if len(spans) > 1:
            raise UserError(f"Expected every target of {task!r} to have `span2`, or none, but only some have.")
        every = Counter(label for target in targets for label in target.labels)
        sets = Counter(tuple(sorted(target.labels)) for target in targets)
        names = tuple(sorted(every, key=lambda name: (-every[name], name)))
        if len(sets) < 2:
            raise UserError(f"Expected targets of {task!r} to differ, but all have the labels {targets[0].labels}.")
        ordered = tuple(sorted(sets.items(), key=lambda entry: (-entry[1], entry[0])))
        return cls(task, names, any(len(entry) != 1 for entry in sets), spans.pop(), ordered)

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
        place = int.from_bytes(blake2b(f"{seed} {words}".encode(), digest_size=8).digest(), "big") % ends[-1]
        return self.sets[bisect_right(ends, place)][0]


@dataclass(frozen=True)
class Targets:
    """T targets of a task, in the order of the sentences.

    Attributes:
        spans: (T, S, 2), first word and word after the last of each span, within the sentence; of a `part` the rows.
        labels: (2, T, K) bool, of the task and of its control task.
        sentence: (T,) number of the sentence among those of `Words`, on the CPU.
        unknown: (T,) number of labels that fitting has not seen, and that no probe can give, on the CPU.
        count: B, of sentences, those without a target included.
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
        starts = words.starts(sentences).repeat_interleave(self.first.diff()[list(sentences)])
        some, device = self._at(numbers_within(self.first, sentences)), words.states.device
        spans = some.spans + starts[:, None, None]
        return replace(some, spans=spans.to(device), labels=some.labels.to(device))

    def _at(self, index: Tensor) -> Self:
        numbers: dict[str, Any] = {"sentence": self.sentence[index], "unknown": self.unknown[index]}
        return replace(self, spans=self.spans[index], labels=self.labels[:, index], **numbers)


def tasks_of(sentences: Sequence[Sentence]) -> list[str]:
    """The names of the tasks that sentences have targets of, in order."""
    return list(dict.fromkeys(target.task for sentence in sentences for target in sentence.targets))


def targets_of(labels: Labels, words: Words, seed: int = 0) -> Targets:
    """The targets of a task.

    Args:
        labels: of the fitting sentences.
        words: the sentences and their rows, fitting ones or others.
        seed: of the control task.

    Raises:
        ValueError: a span is not within its sentence, or there are other than `labels.spans` spans.
    """
    spans, sets, sentence = [], [], []
    for number, target in _of_task(labels.task, words.sentences):
        strings = words.sentences[number].words
        given = _spans(target, labels, len(strings))
        spans.append(given)
        sets.append((target.labels, labels.drawn("\t".join(" ".join(strings[slice(*span)]) for span in given), seed)))
        sentence.append(number)
    hot = {labelling: labels.multi_hot(labelling) for pair in sets for labelling in pair}
    own_labels = [torch.stack([hot[pair[side]] for pair in sets]) for side in range(2)] if sets else []
    return Targets(
        torch.tensor(spans, dtype=torch.int64).view(-1, labels.spans, 2),
        torch.stack(own_labels) if sets else torch.zeros(2, 0, len(labels.names), dtype=torch.bool),
        torch.tensor(sentence, dtype=torch.int64),
        torch.tensor([len(set(strings) - set(labels.names)) for strings, _ in sets], dtype=torch.int64),
        len(words.sentences),
    )


def _spans(target: Target, labels: Labels, words: int) -> list[tuple[int, int]]:
    spans = [target.span1, *([target.span2] if target.span2 else [])]
    if len(spans) != labels.spans:
        raise UserError(f"Expected {labels.spans} spans of every target of {labels.task!r}, but got {len(spans)}.")
    for first, end in spans:
        if not 0 <= first < end <= words:
            raise UserError(
                f"Expected spans of {labels.task!r} within the {words} words of their sentence, but got "
                f"({first}, {end})."
            )
    return spans


def _of_task(task: str, sentences: Sequence[Sentence]) -> Iterator[tuple[int, Target]]:
    for number, sentence in enumerate(sentences):
        yield from ((number, target) for target in sentence.targets if target.task == task)


class EdgeProbes(Probes):
    """Projection, attention within each span, and a network of two layers.

    Args:
        arms: A, the number of probes.
        width: d, of the states.
        labels: K, the number of labels.
        spans: S, 1 or 2 for each target.
        several: whether a target may have several labels, or none: each is then a question of its own.
        projection: width to which states are projected before they are pooled.
        hidden: width of the hidden layer.

    References:
        Tenney et al. 2019, "What do you learn from context? Probing for sentence structure in contextualized word
        representations", ICLR, §3.1 and Figure 1; as used by Merchant et al. 2020, §4.1.
    """

    control: Tensor

    def __init__(
        self,
        arms: Sequence[Arm],
        width: int,
        labels: int,
        spans: int = 1,
        several: bool = False,
        projection: int = 256,
        hidden: int = 256,
    ) -> None:
        super().__init__(arms, width)
        self.labels, self.spans, self.several = labels, spans, several
        self.projection, self.hidden = projection, hidden
        self.projections = nn.ModuleList(BankLinear(len(arms), width, projection) for _ in range(spans))
        self.attention = nn.ModuleList(BankLinear(len(arms), projection, 1) for _ in range(spans))
        self.first = BankLinear(len(arms), spans * projection, hidden)
        self.last = BankLinear(len(arms), hidden, labels)
        self.register_buffer("control", torch.tensor([int(arm.control) for arm in arms]), persistent=False)

    def forward(self, read: Tensor, part: Targets) -> Tensor:
        """Logits of each target: rows of words (A, n, d) -> (A, T, K)."""
        layers = enumerate(zip(self.projections, self.attention, strict=True))
        pooled = [_pooled(project(read), attend, part.spans[:, span]) for span, (project, attend) in layers]
        hidden = self.first(torch.cat(pooled, -1)).tanh()
        return self.last(nn.functional.layer_norm(hidden, (self.hidden,)))

    def asked(self, part: Targets) -> Tensor:
        """The labels that each arm is asked for, (A, T, K) bool: those of the task, or of its control task."""
        return part.labels[self.control]

    def losses(self, read: Tensor, part: Targets) -> Tensor:
        """Negative log-likelihood of the labels of each target, in nats, (A, T)."""
        return self.surprise(self(read, part), part)

    def surprise(self, logits: Tensor, part: Targets) -> Tensor:
        """Negative log-likelihood of the labels of each target, in nats.

        Args:
            logits: (A, T, K).
            part: of T targets.

        Returns:
            (A, T); infinite for a target whose only label is not among the K.
        """
        labels = self.asked(part)
        if self.several:
            losses = nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")
            return losses.sum(-1)
        return -logits.log_softmax(-1).masked_fill(~labels, -torch.inf).amax(-1)


def _pooled(states: Tensor, attend: nn.Module, spans: Tensor) -> Tensor:
    """Average the rows of each span, weighted by attention: (A, n, p), (T, 2) -> (A, T, p)."""
    first, end = spans.unbind(1)
    longest = int((end - first).max())
    if longest == 1:
        return states[:, first]
    rows = first[:, None] + torch.arange(longest, device=states.device)
    real = rows < end[:, None]
    rows = rows.where(real, first[:, None])
    scores = attend(states)[..., 0][:, rows].masked_fill(~real, -torch.inf)
    return (scores.softmax(-1)[..., None] * states[:, rows]).sum(2)


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
        """The probe, and numbers of sentences and targets, for the report."""
        known = {"n_sentences": len(self.targets.sentences), "n_targets": len(self.targets)}
        return {"probe": "edge", **known, "n_unknown": int(self.targets.unknown.sum())}

    def measures(self, weights: Tensor) -> dict[str, Tensor]:
        """The measure, (A, R), where a sentence counts as often as `weights` (R, B) say."""
        return {"F1": f1(weights @ self.counts)}


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
        counted = majority(self.labels, targets) if bank is None else counts(bank, Examples(held, targets))
        return EdgeScores(counted, targets)

    def columns(self, scores: Sequence[EdgeScores], arm: int, weights: Tensor) -> Row:
        """F1 and accuracy, of all seeds together."""
        sums = torch.stack([result.counts[arm] for result in scores])
        total = sums.sum((0, 1))
        exact = accuracy(total, len(scores[0].targets) * len(scores))
        return {**score_columns("score", f1(total), f1(weights @ sums.sum(0)), f1(sums.sum(1))), "accuracy": exact}

    def of_probe(self, scores: Sequence[EdgeScores], arm: int, weights: Tensor) -> Row:
        """Parameters, which layers a mix reads, and how much better a probe is than that of the control task."""
        parameters = self.banks[0].probes.parameters()
        row: Row = {"parameters": sum(weight.numel() for weight in parameters) // len(self.arms)}
        if self.arms[arm] == Arm("model", None):
            row["centre_of_gravity"] = centre_of_gravity(self.banks, arm)
        control = self.arms[arm]._replace(control=True)
        if control in self.arms:
            counts = torch.stack([result.counts for result in scores]).sum(0)[[arm, self.arms.index(control)]]
            (task_f1, other), (drawn, drawn_other) = f1(counts.sum(1)), f1(weights @ counts)
            row |= {"control": other, **score_columns("selectivity", task_f1 - other, drawn - drawn_other)}
        return row


def centre_of_gravity(banks: Sequence[Bank], arm: int) -> float:
    """The layer that a mix reads on average, Σ_l l · weight_l, mean over seeds (Tenney et al. 2019b, §3.2)."""
    layers = torch.tensor([float(place.layer) for place in banks[0].places])
    return float(torch.stack([bank.readings.weights()[arm].cpu() for bank in banks]).mean(0) @ layers)


def counts(bank: Bank, examples: Examples) -> Tensor:
    """`EdgeScores.counts` of a bank: it gives the most likely label, or all that are more likely than not."""
    probes, targets = cast(EdgeProbes, bank.probes), cast(Targets, examples.annotations)
    sums = torch.zeros(len(bank.arms), targets.count, 4, dtype=torch.float64)
    for part, logits in answers(bank, examples):
        best = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).bool()
        given, unknown = logits > 0 if probes.several else best, part.unknown * (1 - probes.control.cpu())[:, None]
        sums.index_add_(1, part.sentence, _of_targets(given, probes.asked(part), unknown))
    return sums


def majority(labels: Labels, targets: Targets) -> Tensor:
    """`EdgeScores.counts` of the most frequent labels of fitting, given to every target: (1, B, 4)."""
    given = labels.multi_hot(labels.sets[0][0]).expand(1, len(targets), -1)
    sums = torch.zeros(1, targets.count, 4, dtype=torch.float64)
    return sums.index_add_(1, targets.sentence, _of_targets(given, targets.labels[:1], targets.unknown[None]))


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
    nats = [probes.surprise(logits.double(), part).cpu() for part, logits in answers(bank, examples)]
    return torch.cat(nats, 1) / math.log(2)
