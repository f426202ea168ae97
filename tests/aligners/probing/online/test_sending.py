from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from aligners.injection.scoring.scores import percentile_interval, resampled_counts
from aligners.probing.arms import Arm
from aligners.probing.bank import Examples
from aligners.probing.edges.probes import edge_bank
from aligners.probing.edges.targets import Labels, Targets, targets_of
from aligners.probing.online.codes import OnlineCode, compressions, portion_ends
from aligners.probing.online.sending import OfSome, by_frequencies, send_labels
from aligners.probing.training import ProbeTraining, train_bank
from aligners.probing.words import Words
from tests.aligners.probing.made import kinds_of_words, made_words

KINDS = 4
QUICK = ProbeTraining(max_epochs=5, batch=16, learning_rate=5e-3, least_steps=20)
SIZES = {"projection": 16, "hidden": 16}
World = tuple[Words, Labels, Targets, Examples]


@pytest.fixture(scope="module")
def world() -> World:
    """Layer 0 is noise, layer 1 half says the kind, layer 2 says it whole."""
    sentences, kinds = kinds_of_words(340, KINDS, forms=40)
    draw = torch.Generator().manual_seed(1)
    noise = torch.randn(3, len(kinds), 8, generator=draw)
    told = torch.nn.functional.one_hot(kinds, 8).float()
    words = made_words(sentences, noise[0], noise[1] + 2 * told, 0.1 * noise[2] + told)
    labels = Labels.of("kind", sentences)
    targets = targets_of(labels, words)
    sent, watched = targets.only(targets.sentence < 300), targets.only(targets.sentence >= 300)
    return words, labels, sent, Examples(words, watched)


@pytest.fixture(scope="module")
def sent(world: World) -> OnlineCode:
    words, labels, targets, watched = world
    arms = [Arm("model", layer) for layer in range(3)] + [Arm("model", 2, control=True)]
    return send_labels(
        lambda own: edge_bank(arms, words, labels, own, **SIZES), Examples(words, targets), watched, labels, QUICK, 0
    )


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


def test_every_target_is_sent_once(world: World, sent: OnlineCode) -> None:
    _, _, targets, _ = world
    assert int(sent.targets.sum()) == len(targets)
    assert sent.uniform.sum() == pytest.approx(len(targets) * math.log2(KINDS))
    assert list(sent.ends) == portion_ends(300)
    torch.testing.assert_close(sent.losses()[:, 0], torch.full((4,), 2.0, dtype=torch.float64))


def test_a_portion_is_sent_by_probes_of_the_portions_before(world: World) -> None:
    words, labels, targets, watched = world
    fresh = partial(edge_bank, [Arm("model", 1)], words, labels, **SIZES)
    found = send_labels(fresh, Examples(words, targets), watched, labels, QUICK, 3, [0.1, 0.5, 1.0])
    order = torch.randperm(300, generator=torch.Generator().manual_seed(3)).tolist()
    bank = fresh(3)
    train_bank(bank, Examples(words, OfSome(targets, sorted(order[:150]))), watched, QUICK, 3)
    last = order[299]
    part = targets.part(words, [last])
    logits = bank(words.read(bank.places, [last]), part)[0].log_softmax(-1)
    expected = -logits[torch.arange(6), part.labels[0].int().argmax(-1)].sum() / math.log(2)
    assert found.bits[0, 299].item() == pytest.approx(expected.item(), rel=1e-5)


def test_more_than_the_frequencies_is_needed_of_equal_kinds(world: World) -> None:
    _, labels, targets, _ = world
    uniform = len(targets) * math.log2(KINDS)
    assert uniform < by_frequencies(targets, labels, control=False) < 1.02 * uniform
