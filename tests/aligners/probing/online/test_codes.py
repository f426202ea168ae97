from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from aligners.probing.codes import PORTIONS, OnlineCode, compressions, frequency_bits, portion_ends, uniform_bits


def test_portions_are_those_of_the_paper() -> None:
    assert portion_ends(10_000) == [10, 20, 40, 80, 160, 320, 625, 1250, 2500, 5000, 10_000]
    assert portion_ends(8) == [1, 2, 4, 8]  # what rounds to nothing is left out
    assert portion_ends(100, [0.5, 1.0]) == [50, 100]


@pytest.mark.parametrize("shares", [[], [0.5], [0.5, 0.1, 1.0], [0.0, 1.0], [0.5, 0.5, 1.0]])
def test_portions_ascend_to_the_whole(shares: list[float]) -> None:
    with pytest.raises(ValueError, match="`portions`"):
        portion_ends(100, shares)


def test_one_unit_cannot_be_sent_in_portions() -> None:
    with pytest.raises(ValueError, match="at least two portions"):
        portion_ends(1)


def test_a_code_of_known_probabilities_has_its_length_in_closed_form() -> None:
    # probes that give the right label of every target of portion p the probability (p + 1) / (p + 2)
    ends, classes = portion_ends(2000), 5
    targets = torch.arange(2000) % 3 + 1
    starts = [0, *ends]
    sent = [
        -targets[first:end].double() * math.log2((p + 1) / (p + 2))
        for p, (first, end) in enumerate(pairwise(ends), start=1)
    ]
    uniform = targets * uniform_bits(classes, several=False)
    found = OnlineCode(ends, torch.arange(2000), [bits[None] for bits in sent], uniform.double(), targets)

    counts = [sum(u % 3 + 1 for u in range(first, end)) for first, end in zip(starts, ends, strict=False)]
    expected = counts[0] * math.log2(5) + sum(
        n * (math.log2(p + 2) - math.log2(p + 1)) for p, n in enumerate(counts[1:], start=1)
    )
    assert found.codelength.item() == pytest.approx(expected, abs=1e-6)
    assert found.compression.item() == pytest.approx(sum(counts) * math.log2(5) / expected, abs=1e-6)
    losses = [math.log2(5), *(math.log2((p + 2) / (p + 1)) for p in range(1, len(ends)))]
    torch.testing.assert_close(found.losses()[0], torch.tensor(losses, dtype=torch.float64))


def test_what_nobody_can_predict_is_not_compressed() -> None:
    units = torch.ones(64)
    found = OnlineCode([1, 64], torch.arange(64), [torch.full((2, 63), 2.0)], 2 * units.double(), units)
    torch.testing.assert_close(found.compression, torch.ones(2, dtype=torch.float64))


def test_codes_of_several_seeds_are_added_unit_by_unit() -> None:
    draw = torch.Generator().manual_seed(0)
    targets = torch.randint(1, 4, (30,), generator=draw)
    codes = []
    for _ in range(2):
        order = torch.randperm(30, generator=draw)
        sent = torch.rand(2, 20, generator=draw, dtype=torch.float64)
        codes.append(OnlineCode([10, 30], order, [sent], 2.0 * targets[order].double(), targets[order]))
    expected = 2 * codes[0].uniform.sum() / (codes[0].codelength + codes[1].codelength)
    torch.testing.assert_close(compressions(codes), expected)
    weights = torch.randint(3, (5, 30), generator=draw).double()
    for r, own in enumerate(weights):
        bits = sum((code.bits * own[code.units]).sum(1) for code in codes)
        uniform = sum((code.uniform * own[code.units]).sum() for code in codes)
        torch.testing.assert_close(compressions(codes, weights)[:, r], uniform / bits)


def test_frequencies_are_counted_as_they_come() -> None:
    draw = torch.Generator().manual_seed(0)
    kinds = torch.randint(0, 3, (40,), generator=draw).clamp(max=1)  # the third label never comes
    probability, seen = Fraction(1), [0, 0, 0]
    for kind in kinds.tolist():
        probability *= (seen[kind] + Fraction(1, 2)) / (sum(seen) + Fraction(3, 2))
        seen[kind] += 1
    expected = math.log2(probability.denominator) - math.log2(probability.numerator)
    found = frequency_bits(torch.nn.functional.one_hot(kinds, 3).bool(), several=False)
    assert found == pytest.approx(expected, abs=1e-9)
    assert found < 40 * uniform_bits(3, several=False)


def test_labels_that_stand_together_are_sent_one_by_one() -> None:
    labels = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 0, 1]]).bool()
    each = sum(frequency_bits(torch.nn.functional.one_hot(own.long(), 2).bool(), several=False) for own in labels.T)
    assert frequency_bits(labels, several=True) == pytest.approx(each)
    assert uniform_bits(3, several=True) == 3
    assert len(PORTIONS) == 11
