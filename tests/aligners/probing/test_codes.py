"""Online codes: their lengths, how labels are sent, and what the report says of them."""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.aligners.probing.made import made_words

from aligners.datamodules.text.annotated.sentence import Sentence, Target
from aligners.injection.scoring.scores import resampled_counts, with_interval
from aligners.probing.codes import OnlineCode, code_rows, compressions, frequency_bits, portion_ends, send, uniform_bits
from aligners.probing.probe_bank import Examples, Variant
from aligners.probing.probes import EdgeTask
from aligners.probing.probing_evaluation import ProbeExperiment
from aligners.probing.probing_tasks import ProbeTraining, train_bank
from aligners.reports.runs.probing.codelengths_report import codes_in_words

Row = dict[str, Any]
KINDS, COUNT = 4, 200  # of sentences of six words


def test_portions_are_those_of_the_paper_and_ascend_to_the_whole() -> None:
    assert portion_ends(10_000) == [10, 20, 40, 80, 160, 320, 625, 1250, 2500, 5000, 10_000]
    assert portion_ends(12) == [1, 2, 3, 6, 12]  # what rounds to nothing is left out
    assert portion_ends(100, [0.5, 1.0]) == [50, 100]
    for shares in ([], [0.5], [0.5, 0.1, 1.0], [0.0, 1.0], [0.5, 0.5, 1.0]):
        with pytest.raises(ValueError, match="`portions`"):
            portion_ends(100, shares)
    with pytest.raises(ValueError, match="`portions`"):
        ProbeExperiment(portions=[0.5, 0.2, 1.0])
    with pytest.raises(ValueError, match="at least two portions"):
        portion_ends(1)


def test_a_code_of_known_probabilities_has_its_length_in_closed_form() -> None:
    # probes that give the right label of every target of portion p the probability (p + 1) / (p + 2)
    ends, classes = portion_ends(2000), 5
    targets = torch.arange(2000) % 3 + 1
    shorter = [math.log2((p + 2) / (p + 1)) for p in range(1, len(ends))]
    sent = [targets[first:end] * bits for (first, end), bits in zip(pairwise(ends), shorter, strict=True)]
    uniform = targets * uniform_bits(classes, several=False)
    found = OnlineCode(ends, torch.arange(2000), [bits[None] for bits in sent], uniform.double(), targets)

    losses = [math.log2(5), *shorter]
    counts = [sum(u % 3 + 1 for u in range(first, end)) for first, end in pairwise([0, *ends])]
    expected = sum(n * bits for n, bits in zip(counts, losses, strict=True))
    assert found.codelength.item() == pytest.approx(expected, rel=1e-6)
    assert found.compression.item() == pytest.approx(sum(counts) * math.log2(5) / expected, rel=1e-6)
    torch.testing.assert_close(found.losses()[0], torch.tensor(losses).double(), rtol=1e-6, atol=0)


def test_codes_of_several_seeds_are_added_unit_by_unit() -> None:
    draw = torch.Generator().manual_seed(0)
    targets = torch.randint(1, 4, (30,), generator=draw)
    codes = []
    for _ in range(2):
        order = torch.randperm(30, generator=draw)
        sent = torch.rand(2, 20, generator=draw, dtype=torch.float64)
        codes.append(OnlineCode([10, 30], order, [sent], 2.0 * targets[order].double(), targets[order]))
    expected = 2 * codes[0].uniform.sum() / (codes[0].codelength + codes[1].codelength)
    torch.testing.assert_close(compressions(codes, torch.ones(1, 30).double())[:, 0], expected)
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
    labels = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 0, 1]]).bool()  # that stand together are sent one by one
    each = sum(frequency_bits(torch.nn.functional.one_hot(own.long(), 2).bool(), several=False) for own in labels.T)
    assert frequency_bits(labels, several=True) == pytest.approx(each)
    assert uniform_bits(3, several=True) == 3


QUICK = ProbeTraining(max_epochs=5, batch=16, learning_rate=5e-3, least_steps=20)
VARIANTS = [*(Variant("model", layer) for layer in range(3)), Variant("model", 2, control=True)]


@pytest.fixture(scope="module")
def task() -> EdgeTask:
    """Layer 0 is noise, layer 1 half says the kind of a word, layer 2 says it whole; its form says nothing of it."""
    draw = torch.Generator().manual_seed(0)
    kinds = torch.randint(KINDS, (COUNT + 40, 6), generator=draw)
    sentences = []
    for own, forms in zip(kinds.tolist(), torch.randint(40, kinds.shape, generator=draw).tolist(), strict=True):
        targets = tuple(Target("kind", (n, n + 1), labels=(f"k{kind}",)) for n, kind in enumerate(own))
        sentences.append(Sentence(tuple(f"w{form}" for form in forms), targets=targets))
    noise = torch.randn(3, kinds.numel(), 8, generator=torch.Generator().manual_seed(1))
    told = torch.nn.functional.one_hot(kinds.flatten(), 8).float()
    states = (noise[0], noise[1] + 2 * told, 0.1 * noise[2] + told)
    words = made_words(sentences[:COUNT], *(own[: 6 * COUNT] for own in states))
    watched = made_words(sentences[COUNT:], *(own[6 * COUNT :] for own in states))
    return EdgeTask("kind", words, watched, VARIANTS, 0, {"projection": 16, "hidden": 16})


def test_what_states_tell_shortens_the_code_and_noise_compresses_nothing(task: EdgeTask) -> None:
    sent = send(task, QUICK, 0)
    _, low, high = with_interval(compressions([sent], resampled_counts(COUNT, 0)))
    assert low[0] <= 1
    assert sent.compression[0] > 0.8  # and not because the probe is far too sure of itself
    assert high[0] < low[1] < high[1] < low[2]
    assert low[2] > 2
    assert sent.codelength[3] > 1.5 * sent.codelength[2]  # a random control task
    # every target is sent once, and more than the frequencies is needed of equal kinds
    assert int(sent.targets.sum()) == 6 * COUNT
    assert sent.uniform.sum() == pytest.approx(6 * COUNT * math.log2(KINDS))
    assert list(sent.ends) == portion_ends(COUNT)
    torch.testing.assert_close(sent.losses()[:, 0], torch.full((4,), 2.0, dtype=torch.float64))
    assert 1 < next(code_rows(task, [sent]))["frequency_bits"] / sent.uniform.sum() < 1.02


def test_a_portion_is_sent_by_probes_of_the_portions_before(task: EdgeTask) -> None:
    task = replace(task, variants=VARIANTS[1:2])
    found = send(task, QUICK, 3, [0.1, 0.5, 1.0])
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(3)).tolist()
    bank, targets = task.fresh(3), task.annotations(task.words)
    train_bank(bank, Examples(task.words, targets, sorted(order[: COUNT // 2])), task.validation(), QUICK, 3)
    last = order[-1]
    part = targets.part(task.words, [last])
    logits = bank(task.words.read(bank.places, [last]), part)[0].log_softmax(-1)
    expected = -logits[torch.arange(6), part.labels[0].int().argmax(-1)].sum() / math.log(2)
    assert found.bits[0, -1].item() == pytest.approx(expected.item(), rel=1e-5)


def code(site: int, compression: float, *, control: bool = False) -> Row:
    return {
        "model": "m", "task": "pos", "source": "model", "site": site, "control": control, "compression": compression,
        "uniform_bits": 300.0, "frequency_bits": 200.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ([0.5, 0.6, 0.9], "pos: codelengths order the sites as F1 does."),
        (
            [0.5, 0.9, 0.6],
            "pos: sites from best to worst by codelength 2, 1, 0, by F1 1, 2, 0 (rank correlation 0.50).",
        ),
    ],
)
def test_it_is_said_whether_codes_order_sites_as_scores_do(scores: list[float], said: str) -> None:
    codes = [code(site, 1.0 + site) for site in range(3)] + [code(2, 1.1, control=True)]
    rows = [{"model": "m", "task": "pos", "source": "model", "site": site, "score": s} for site, s in enumerate(scores)]
    assert list(codes_in_words(codes, rows)) == [
        "pos: labels are compressed most at site 2, 3.00 times (control task 1.10); a code that knows "
        "only their frequencies compresses 1.50 times.",
        said,
    ]
