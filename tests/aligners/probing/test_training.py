"""How long each probe of a bank is trained, and at what rate."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.aligners.probing.made import drawn_words
from torch import nn

from aligners.probing.probe_bank import Bank, Examples, Variant, answers, fresh_bank, losses
from aligners.probing.probes import DepthProbes, DistanceProbes, EdgeTask, StructuralProbes, TreeTask
from aligners.probing.probing_tasks import ProbeTraining, Progress, ended, train_bank
from aligners.probing.storing import ENTRY, load_banks, save_banks
from aligners.probing.trees import Trees
from aligners.probing.word_states import make_task

VARIANTS = [Variant("model", 0), Variant("model", 1)]
OF_EDGES = [Variant("model", 1), Variant("untrained", 0), Variant("model", None), Variant("model", None, control=True)]
OF_RANKS = [Variant("model", 0, rank=2), Variant("model", 1), Variant("untrained", 1, rank=4)]


def test_each_arm_has_its_own_rate_end_and_weights() -> None:
    bank = nn.Linear(1, 3, bias=False)  # three variants of one weight
    nn.init.zeros_(bank.weight)
    optimizer = torch.optim.SGD(bank.parameters(), lr=1.0)
    progress = Progress(bank, torch.ones(3), patience=2)  # type: ignore[arg-type]
    for found in ([0.9, 2.0, 2.0], [0.8, 2.0, 0.5], [0.7, 0.1, 0.6]):
        bank.weight.grad = -torch.ones_like(bank.weight)
        progress.step(optimizer)
        progress.check(torch.tensor(found))
    assert progress.rates.tolist() == [1, 0, 0.25]
    assert bank.weight.flatten().tolist() == [3, 1.5, 2]  # 1 + 1 + 1, 1 + 1/2 + 0, 1 + 1/2 + 1/2
    progress.take_back()
    assert bank.weight.flatten().tolist() == [3, 0, 1.5]  # an variant that has ended stays so, though .1 is less


@pytest.mark.parametrize(("name", "variants"), [("arc", OF_EDGES), ("distance", OF_RANKS)])
def test_a_bank_is_its_probes_one_after_another(name: str, variants: list[Variant]) -> None:
    words, watched = drawn_words(), drawn_words(seed=50)

    def task_of(chosen: list[Variant]) -> EdgeTask | TreeTask:
        return make_task(name, words, watched, chosen, {"projection": 5, "hidden": 4}, seed=0)

    def trained(chosen: list[Variant]) -> Bank:
        task = task_of(chosen)
        task.train(ProbeTraining(max_epochs=3, batch=2, learning_rate=1e-2, least_steps=4), 0)
        return task.banks[0]

    together, asked = trained(variants), task_of(variants).fitting
    for a, variant in enumerate(variants):
        alone, part = trained([variant]), together.only([a])
        assert not any(weight.requires_grad for weight in alone.parameters())
        assert (part.places, part.variants) == (alone.places, alone.variants)
        whole, one, other, fresh, another = (
            torch.cat([found.flatten(1) for _, found in answers(bank, asked)], 1)
            for bank in (together, part, alone, *(task_of([variant]).fresh(seed) for seed in range(2)))
        )
        for found in (whole[a], one[0]):
            torch.testing.assert_close(found, other[0], rtol=1e-3, atol=1e-4)
        assert not torch.allclose(fresh, other, atol=1e-2)
        assert not torch.allclose(fresh, another, atol=1e-2)  # a start of its own for each seed


@pytest.mark.parametrize("width", [6, 384])
@pytest.mark.parametrize("kind", [DistanceProbes, DepthProbes])
def test_the_rate_of_a_structural_probe_does_not_fall_with_the_width(kind: type[StructuralProbes], width: int) -> None:
    words = drawn_words(width=width)
    asked = Examples(words, Trees.of(words))
    banks = [fresh_bank(kind, VARIANTS, words, 0) for _ in range(2)]
    train_bank(banks[0], asked, asked, ProbeTraining(max_epochs=1, learning_rate=1e-6, least_steps=1), 0)
    before, after = (bank.probes.get_parameter("weight") for bank in reversed(banks))
    assert (after - before).abs().quantile(0.9).item() == pytest.approx(1e-6, rel=0.1)


def test_training_ends_when_nothing_is_left_to_learn_and_the_limit_is_said() -> None:
    words, other = drawn_words(), drawn_words(seed=50)
    fitting, watched = (Examples(own, Trees.of(own)) for own in (words, other))
    for most, unfinished in ((1, VARIANTS), (200, [])):
        bank = fresh_bank(DistanceProbes, VARIANTS, words, 0)
        start = losses(bank, watched)
        how = ProbeTraining(max_epochs=most, learning_rate=1e-4 if most == 1 else 3e-2, patience=2, least_steps=4)
        train_bank(bank, fitting, watched, how, 0)
        assert bank.unfinished == unfinished
        assert (losses(bank, watched) <= start).all()
        assert ended([bank, bank]) == {"probes": 2 * len(unfinished), "of": 4}


def test_probes_that_an_earlier_version_has_saved_are_read(tmp_path: Path) -> None:
    """They were of the states' width where no rank was given, and centred for depths, too."""
    words = drawn_words()
    bank = fresh_bank(DepthProbes, VARIANTS, words, 0)
    bank.readings.mean += 3
    save_banks(tmp_path / "new", {"depth": (bank, {})})
    with safe_open(tmp_path / "new", "pt") as file:
        described = json.loads(file.metadata()[ENTRY])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (no mapping)
    del described["depth"]["options"]["usual"]
    save_file(tensors, tmp_path / "old", metadata={ENTRY: json.dumps(described)})
    found, _ = load_banks(tmp_path / "old")["depth"]
    part = Trees.of(words).part(words, [2, 3])
    states = words.read(bank.places, [2, 3])
    torch.testing.assert_close(found(states, part), bank(states, part).detach())
