"""Lengths of codes, in bits: online, uniform, and that of a code which knows the labels' frequencies alone."""

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

# where the portions end, as shares of what is sent (Voita and Titov 2020, §2.2)
PORTIONS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)
PRIOR = 0.5  # of each label, in the code by frequencies: Krichevsky and Trofimov 1981


def portion_ends(count: int, shares: Sequence[float] = PORTIONS) -> list[int]:
    """How many units have been sent at the end of each portion, ascending, the last one `count`.

    Args:
        count: of all units.
        shares: of them. Those that round to no unit, or to no more than the share before, are left out.

    Raises:
        ValueError: shares do not ascend to 1, or leave fewer than two portions.
    """
    ascending = list(shares) == sorted(set(shares))
    if not shares or not ascending or shares[0] <= 0 or shares[-1] != 1:
        raise UserError(
            f"Expected `portions` to ascend from above 0 to 1, but got {list(shares)}."
        )
    ends = sorted({round(share * count) for share in shares} - {0})
    if len(ends) < 2:
        raise UserError(
            f"Expected at least two portions of sentences, one to train on and one to send, but {count} with something "
            f"to send make {len(ends)}. Give more text, or other `portions`."
        )
    return ends


def uniform_bits(labels: int, *, several: bool) -> float:
    """Bits of a target that is sent without any model: log₂ K, or 1 for each of K labels that may stand together."""
    if several:
        return float(labels)
    return math.log2(labels)


def frequency_bits(labels: Tensor, *, several: bool) -> float:
    """Bits of an adaptive code that counts the labels sent so far, and reads no states.

    The next label has the probability (n_k + 1/2) / (n + K/2) where n_k of n so far were of its kind; the length of
    the whole does not depend on the order. Where labels stand together, each is sent as a yes or no of its own.

    Reference: Krichevsky and Trofimov 1981, "The performance of universal encoding", IEEE Trans. Inf. Theory 27.

    Args:
        labels: (T, K) bool.
        several: whether a target may have any number of them.
    """
    counts = labels.sum(0).double()
    if not several:
        return float(_sequence_bits(counts))
    bits = 0.0
    for count in counts:
        bits += float(_sequence_bits(torch.stack((count, len(labels) - count))))
    return bits


def _sequence_bits(counts: Tensor) -> Tensor:
    """Bits of any sequence with these counts of each symbol."""
    prior = torch.full_like(counts, PRIOR)
    seen = counts + prior
    before = prior.lgamma().sum() - prior.sum().lgamma()
    after = seen.lgamma().sum() - seen.sum().lgamma()
    return (before - after) / math.log(2)


@dataclass(frozen=True)
class OnlineCode:
    """What it took to send the labels of all units, portion by portion, with each of A probes.

    A unit is what is sent in one piece: a sentence with all of its targets. The first portion is sent by the uniform
    code; each further one by a probe that was trained afresh on all portions before.

    Attributes:
        ends: how many units have been sent at the end of each of P portions.
        units: (U,) their numbers, in the order of sending.
        sent: of each portion but the first, the bits (A, units) of its units.
        uniform: (U,) bits of each by the uniform code, float64.
        targets: (U,) how many targets each has.
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
        """Bits of each unit, (A, U)."""
        first = self.uniform[: self.ends[0]].expand(len(self.sent[0]), -1)
        others = [bits.double() for bits in self.sent]
        return torch.cat([first, *others], 1)

    @property
    def codelength(self) -> Tensor:
        """Bits of everything, (A,)."""
        return self.bits.sum(1)

    @property
    def compression(self) -> Tensor:
        """Bits of the uniform code over bits of this one, (A,): 1 says that nothing is compressed."""
        return self.uniform.sum() / self.codelength

    def losses(self) -> Tensor:
        """Bits a target in each portion, (A, P). The first is sent by the uniform code."""
        sizes = [end - first for first, end in pairwise([0, *self.ends])]
        losses = []
        for bits, targets in zip(
            self.bits.split(sizes, 1), self.targets.split(sizes), strict=True
        ):
            losses.append(bits.sum(1) / targets.sum())
        return torch.stack(losses, 1)


def compressions(codes: Sequence[OnlineCode], weights: Tensor) -> Tensor:
    """Compression over several codes of the same units, such as those of several seeds, as one: (A, R).

    Args:
        codes: of equally many probes.
        weights: (R, U) how often each unit counts in each resample, by its number among all units that are sent, in
            ascending order. Probes and order stay as they are.
    """
    bits = torch.zeros(())
    uniform = torch.zeros(())
    for code in codes:
        order = code.units.argsort()
        bits = bits + code.bits[:, order]
        uniform = uniform + code.uniform[order]
    return (uniform @ weights.T) / (bits @ weights.T)


def send(
    task: EdgeTask, how: ProbeTraining, seed: int, portions: Sequence[float] = PORTIONS
) -> OnlineCode:
    """Send the labels of all fitting targets, a sentence at a time in an order that the seed draws.

    The receiver knows the number of labels, the sentences themselves, and the labels of the validation sentences, which
    nobody trains on: they say when a probe has learned enough. All probes of a bank are trained on, and send, the same
    sentences; a variant with a control task sends its labels.

    Args:
        task: whose labels are sent.
        how: each bank is trained.
        seed: of the order, the weights and the training.
        portions: see `portion_ends`.

    Raises:
        ValueError: too few sentences, or as `train_bank` does.
    """
    words = task.words
    targets = task.fitting.annotations
    watched = task.validation()
    sentences = torch.tensor(targets.sentences)
    draw = torch.Generator().manual_seed(seed)
    units = sentences[torch.randperm(len(sentences), generator=draw)]
    order = units.tolist()
    counts = targets.first.diff()[units]

    sent = []
    unfinished = 0
    ends = portion_ends(len(order), portions)
    for first, end in pairwise(ends):
        bank = task.fresh(seed)
        train_bank(
            bank, Examples(words, targets, sorted(order[:first])), watched, how, seed
        )
        unfinished += len(bank.unfinished)
        bits = codelengths(bank, Examples(words, targets, order[first:end]))
        owner = torch.arange(end - first).repeat_interleave(counts[first:end])
        of_units = bits.new_zeros(len(bits), end - first)
        sent.append(of_units.index_add_(1, owner, bits))
    uniform = counts * uniform_bits(len(task.labels.names), several=task.labels.several)
    return OnlineCode(ends, units, sent, uniform.double(), counts, unfinished)


def code_rows(task: EdgeTask, codes: Sequence[OnlineCode]) -> Iterator[Row]:
    """One row for each variant, with the mean of the codelengths over seeds.

    Args:
        task: whose labels were sent.
        codes: one of each seed.
    """
    bits = torch.stack([code.codelength for code in codes])
    by_seed = torch.stack([code.compression for code in codes])
    units = len(codes[0].units)
    resampled = compressions(codes, resampled_counts(units, task.seed))
    targets = task.fitting.annotations
    for number, variant in enumerate(task.variants):
        labels = targets.labels[int(variant.control)]
        row = {
            **_about(task, variant),
            "bits": float(bits[:, number].mean()),
            "uniform_bits": float(codes[0].uniform.sum()),
            "frequency_bits": frequency_bits(labels, several=task.labels.several),
        }
        compression = score_columns(
            "compression", resampled[number], by_seed[:, number]
        )
        for name, value in compression.items():
            row[name] = float(value)
        yield {**row, "n_sentences": units, "n_targets": len(targets)}


def portion_rows(task: EdgeTask, codes: Sequence[OnlineCode]) -> Iterator[Row]:
    """One row for each variant, seed and portion, with the bits that a target took."""
    for seed, code in enumerate(codes):
        losses = code.losses().tolist()
        for variant, own in zip(task.variants, losses, strict=True):
            for end, loss in zip(code.ends, own, strict=True):
                share = end / code.ends[-1]
                yield {
                    **_about(task, variant),
                    "seed": seed,
                    "share": share,
                    "bits_a_target": loss,
                }


def _about(task: EdgeTask, variant: Variant) -> Row:
    return {
        "task": task.name,
        "source": variant.source,
        "site": variant.layer,
        "control": variant.control,
    }
