from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from aligners.injection.scoring.scores import percentile_interval, resampled_counts
from aligners.probing.bank import Arm, Examples
from aligners.probing.codes import OnlineCode, code_rows, compressions, portion_ends, send
from aligners.probing.edges import EdgeTask
from aligners.probing.training import ProbeTraining, train_bank
from tests.aligners.probing.made import kinds_of_words, made_words

KINDS = 4
QUICK = ProbeTraining(max_epochs=5, batch=16, learning_rate=5e-3, least_steps=20)
SIZES = {"projection": 16, "hidden": 16}
ARMS = [*(Arm("model", layer) for layer in range(3)), Arm("model", 2, control=True)]


@pytest.fixture(scope="module")
def task() -> EdgeTask:
    """Layer 0 is noise, layer 1 half says the kind, layer 2 says it whole."""
    sentences, kinds = kinds_of_words(340, KINDS, forms=40)
    draw = torch.Generator().manual_seed(1)
    noise = torch.randn(3, len(kinds), 8, generator=draw)
    told = torch.nn.functional.one_hot(kinds, 8).float()
    states = (noise[0], noise[1] + 2 * told, 0.1 * noise[2] + told)
    words = made_words(sentences[:300], *(own[: 6 * 300] for own in states))
    return EdgeTask("kind", words, made_words(sentences[300:], *(own[6 * 300 :] for own in states)), ARMS, 0, SIZES)


@pytest.fixture(scope="module")
def sent(task: EdgeTask) -> OnlineCode:
    return send(task, QUICK, 0)


def interval(sent: OnlineCode) -> tuple[torch.Tensor, torch.Tensor]:
    return percentile_interval(compressions([sent], resampled_counts(300, 0)))


def test_noise_compresses_nothing(sent: OnlineCode) -> None:
    low, _ = interval(sent)
    assert low[0] <= 1
    assert sent.compression[0] > 0.8  # and not because the probe is far too sure of itself


def test_what_states_tell_shortens_the_code(sent: OnlineCode) -> None:
    low, high = interval(sent)
    assert high[0] < low[1] < high[1] < low[2]
    assert low[2] > 2


def test_a_random_control_task_has_a_longer_code(sent: OnlineCode) -> None:
    assert sent.codelength[3] > 1.5 * sent.codelength[2]


def test_every_target_is_sent_once(sent: OnlineCode) -> None:
    assert int(sent.targets.sum()) == 6 * 300
    assert sent.uniform.sum() == pytest.approx(6 * 300 * math.log2(KINDS))
    assert list(sent.ends) == portion_ends(300)
    torch.testing.assert_close(sent.losses()[:, 0], torch.full((4,), 2.0, dtype=torch.float64))


def test_a_portion_is_sent_by_probes_of_the_portions_before(task: EdgeTask) -> None:
    task = replace(task, arms=ARMS[1:2])
    found = send(task, QUICK, 3, [0.1, 0.5, 1.0])
    order = torch.randperm(300, generator=torch.Generator().manual_seed(3)).tolist()
    bank, targets = task.fresh(3), task.annotations(task.words)
    train_bank(bank, Examples(task.words, targets, sorted(order[:150])), task.validation(), QUICK, 3)
    last = order[299]
    part = targets.part(task.words, [last])
    logits = bank(task.words.read(bank.places, [last]), part)[0].log_softmax(-1)
    expected = -logits[torch.arange(6), part.labels[0].int().argmax(-1)].sum() / math.log(2)
    assert found.bits[0, 299].item() == pytest.approx(expected.item(), rel=1e-5)


def test_more_than_the_frequencies_is_needed_of_equal_kinds(task: EdgeTask, sent: OnlineCode) -> None:
    uniform = 6 * 300 * math.log2(KINDS)
    assert uniform < next(code_rows(task, [sent]))["frequency_bits"] < 1.02 * uniform
