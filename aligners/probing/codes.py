"""Code lengths, in bits: the online code, the uniform code, and a code based on the frequencies of labels."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.injection.scoring.scores import resampled_counts
from aligners.probing.probe_bank import Examples, Variant
from aligners.probing.probes import EdgeTask, codelengths
from aligners.probing.probing_tasks import ProbeTraining, Row, score_columns, train_bank

# ends of the portions, as shares of what is sent (Voita and Titov 2020, §2.2)
PORTIONS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)
PRIOR = 0.5  # initial count of each label, in the code by frequencies: Krichevsky and Trofimov 1981
Shares = Sequence[float]


def portion_ends(count: int, shares: Shares = PORTIONS) -> list[int]:
    """Return how many units have been sent at the end of each portion, in ascending order; the last is `count`.

    Args:
        count: number of all units.
        shares: shares of all units at the ends. Those that round to no unit, or to no more than the share before, are
            left out.

    Raises:
        ValueError: shares do not ascend to 1, or leave fewer than two portions.
    """
    ordered = sorted({0, *shares})
    if [0, *shares] != ordered or ordered[-1] != 1:
        raise UserError(
            f"Expected `portions` to ascend from above 0 to 1, but got {list(shares)}."
        )
    rounded = {round(share * count) for share in shares}
    ends = sorted(rounded - {0})
    if len(ends) < 2:
        raise UserError(
            f"Expected at least two portions of sentences, one to train on and one to send, but the {count} "
            f"sentences with targets make {len(ends)}. Give more text, or other `portions`."
        )
    return ends


def uniform_bits(labels: int, *, several: bool) -> float:
    """Return the bits of a target sent without any model: log₂ K, or K where a target may have several of K labels."""
    if several:
        return float(labels)
    return math.log2(labels)


def frequency_bits(labels: Tensor, *, several: bool) -> float:
    """Return the bits of an adaptive code that counts the labels sent so far, and reads no states.

    The next label has the probability (n_k + 1/2) / (n + K/2) if it equals n_k of the n labels so far; the total length
    does not depend on the order. Where a target may have several labels, each is sent as a yes or no.

    Reference: Krichevsky and Trofimov 1981, "The performance of universal encoding", IEEE Trans. Inf. Theory 27.

    Args:
        labels: (T, K) bool.
        several: whether a target may have any number of labels.
    """
    counts = labels.sum(0).double()
    if not several:
        return _sequence_bits(counts)
    bits = 0.0
    for yes in counts:
        no = len(labels) - yes
        bits += _sequence_bits(torch.stack((yes, no)))
    return bits


def _sequence_bits(counts: Tensor) -> float:
    """Return the bits of any sequence with these counts of each symbol."""
    prior = torch.full_like(counts, PRIOR)
    nats = _log_beta(prior) - _log_beta(counts + prior)
    return float(nats / math.log(2))


def _log_beta(counts: Tensor) -> Tensor:
    """Return the logarithm of the multivariate beta function."""
    return counts.lgamma().sum() - counts.sum().lgamma()


@dataclass(frozen=True)
class OnlineCode:
    """The cost of sending the labels of all units, portion by portion, with each of A probes.

    A unit is what is sent in one piece: a sentence with all of its targets. The first portion is sent by the uniform
    code; each further one by a probe that was trained afresh on all portions before it.

    Attributes:
        ends: number of units sent at the end of each of P portions.
        units: (U,) numbers of the units, in the order of sending.
        sent: for each portion but the first, the bits of its units, (A, units).
        uniform: (U,) bits of each unit by the uniform code, float64.
        targets: (U,) number of targets of each unit.
        unfinished: how many of all probes were still learning at the limit of their training.

    Reference: Voita and Titov 2020, "Information-theoretic probing with minimum description length", EMNLP, §2.2,
    eq. 3; the codelength of Blier and Ollivier 2018, "The description length of deep learning models", NeurIPS.
    """

    ends: Sequence[int]
    units: Tensor
    sent: Sequence[Tensor]
    uniform: Tensor
    targets: Tensor
    unfinished: int = 0

    @cached_property
    def bits(self) -> Tensor:
        """Return the bits of each unit, (A, U)."""
        probes = len(self.sent[0])
        first = self.uniform[: self.ends[0]]
        parts = [first.expand(probes, -1)]
        for bits in self.sent:
            parts.append(bits.double())
        return torch.cat(parts, 1)

    @property
    def codelength(self) -> Tensor:
        """Return the bits of all units together, (A,)."""
        return self.bits.sum(1)

    @property
    def compression(self) -> Tensor:
        """Return the bits of the uniform code divided by those of this one, (A,): 1 where nothing is compressed."""
        return self.uniform.sum() / self.codelength

    def losses(self) -> Tensor:
        """Return the bits per target in each portion, (A, P). The first portion is sent by the uniform code."""
        losses = []
        for first, end in pairwise([0, *self.ends]):
            bits = self.bits[:, first:end].sum(1)
            targets = self.targets[first:end].sum()
            losses.append(bits / targets)
        return torch.stack(losses, 1)


def compressions(codes: Sequence[OnlineCode], weights: Tensor) -> Tensor:
    """Return the compression of several codes of the same units together, such as those of several seeds: (A, R).

    Args:
        codes: codes with equal numbers of probes.
        weights: (R, U) how often each unit counts in each resample, in ascending order of the units' numbers. The
            probes and the order of sending stay as they are.
    """
    bits = torch.zeros(())
    uniform = torch.zeros(())
    for code in codes:
        order = code.units.argsort()
        bits = bits + code.bits[:, order]
        uniform = uniform + code.uniform[order]
    return (uniform @ weights.T) / (bits @ weights.T)


def send(
    task: EdgeTask, how: ProbeTraining, seed: int, portions: Shares = PORTIONS
) -> OnlineCode:
    """Send the labels of all fitting targets, a sentence at a time, in an order that the seed draws.

    The receiver knows the number of labels, the sentences themselves, and the labels of the validation sentences, on
    which no probe is trained: they decide when training stops. All probes of a bank are trained on, and send, the same
    sentences; a variant with a control task sends that task's labels.

    Args:
        task: the task whose labels are sent.
        how: how each bank is trained.
        seed: seed of the order, the weights and the training.
        portions: see `portion_ends`.

    Raises:
        ValueError: too few sentences, or as `train_bank` does.
    """
    targets = task.fitting.annotations
    watched = task.validation()
    units = _shuffled(targets.sentences, seed)
    counts = targets.first.diff()[units]
    ends = portion_ends(len(units), portions)

    sent = []
    unfinished = 0
    for first, end in pairwise(ends):
        known, _ = units[:first].sort()
        fitting = Examples(task.words, targets, known.tolist())
        bank = task.fresh(seed)
        train_bank(bank, fitting, watched, how, seed)
        unfinished += len(bank.unfinished)

        portion = Examples(task.words, targets, units[first:end].tolist())
        bits = codelengths(bank, portion)
        sent.append(_sums(bits, counts[first:end]))

    uniform = _uniform(task, counts)
    return OnlineCode(ends, units, sent, uniform, counts, unfinished)


def _uniform(task: EdgeTask, counts: Tensor) -> Tensor:
    """Return the bits of units with so many targets each, (U,), by the uniform code."""
    labels = len(task.labels.names)
    each = uniform_bits(labels, several=task.labels.several)
    bits = counts * each
    return bits.double()


def _shuffled(numbers: Sequence[int], seed: int) -> Tensor:
    """Return numbers in an order that the seed draws."""
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(numbers), generator=draw)
    return torch.tensor(numbers)[order]


def _sums(bits: Tensor, counts: Tensor) -> Tensor:
    """Sum the bits of all targets, (A, T), over each unit's targets: (A, U)."""
    units = len(counts)
    unit = torch.arange(units).repeat_interleave(counts)
    sums = bits.new_zeros(len(bits), units)
    return sums.index_add_(1, unit, bits)


def code_rows(task: EdgeTask, codes: Sequence[OnlineCode]) -> Iterator[Row]:
    """Make one row for each variant, with the mean of the code lengths over seeds.

    Args:
        task: the task whose labels were sent.
        codes: one code of each seed.
    """
    bits = torch.stack([code.codelength for code in codes])
    by_seed = torch.stack([code.compression for code in codes])
    units = len(codes[0].units)
    weights = resampled_counts(units, task.seed)
    resampled = compressions(codes, weights)
    targets = task.fitting.annotations
    for a, variant in enumerate(task.variants):
        labels = targets.labels[int(variant.control)]
        row = {
            **_about(task, variant),
            "bits": float(bits[:, a].mean()),
            "uniform_bits": float(codes[0].uniform.sum()),
            "frequency_bits": frequency_bits(labels, several=task.labels.several),
        }
        found = score_columns("compression", resampled[a], by_seed[:, a])
        for name, value in found.items():
            row[name] = float(value)
        yield {**row, "n_sentences": units, "n_targets": len(targets)}


def portion_rows(task: EdgeTask, codes: Sequence[OnlineCode]) -> Iterator[Row]:
    """Make one row for each variant, seed and portion, with the bits per target."""
    for seed, code in enumerate(codes):
        losses = code.losses().tolist()
        for variant, own in zip(task.variants, losses, strict=True):
            about = _about(task, variant)
            for end, loss in zip(code.ends, own, strict=True):
                yield {
                    **about,
                    "seed": seed,
                    "share": end / code.ends[-1],
                    "bits_a_target": loss,
                }


def _about(task: EdgeTask, variant: Variant) -> Row:
    return {
        "task": task.name,
        "source": variant.source,
        "site": variant.layer,
        "control": variant.control,
    }
