"""Heads in a bank, and classifiers that are truncated or skip layers."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tests.runs import quiet_trainer
from tests.tiny import CLASSIFIERS, TEXTS, tiny_folder, tiny_frozen, tokenised
from tests.world import TEST_TEXTS, World, sentences, write_texts
from torch import Tensor

from aligners.datamodules.model_texts import ModelTexts, labelled_texts
from aligners.datamodules.text.sources import TextSource
from aligners.finetuning.classifier_training import FinetuningRecipe
from aligners.finetuning.truncating import MEAN, HeadBank, SurgeryEvaluation, conditions
from aligners.models import FrozenModel

LABELS = torch.tensor([0, 1, 0, 1, 1])


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_heads_start_as_the_model_s_own_and_alone_get_gradients(architecture: str) -> None:
    model, inputs = tiny_frozen(architecture), tokenised()
    bank = HeadBank(model, 4)
    states = model.front(inputs, range(4))
    logits = bank.logits(model, inputs, states)
    assert logits.shape == (4, len(TEXTS), 2)
    for site in range(4):
        assert torch.equal(logits[site], model.tail(inputs, model.depth, states[site]))
    logits.square().sum().backward()
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in bank.parameters() if weight.ndim > 1)
    assert all(weight.grad is None and not weight.requires_grad for weight in model.model.parameters())


def trained(model: FrozenModel, sites: list[int]) -> Tensor:
    """The weights of the last head after some steps on the sum of all losses."""
    bank = HeadBank(model, len(sites))
    optimizer = torch.optim.AdamW(bank.parameters(), lr=1e-2)
    states = model.front(tokenised(), sites)
    for _ in range(3):
        optimizer.zero_grad()
        loss = [torch.nn.functional.cross_entropy(each, LABELS) for each in bank.logits(model, tokenised(), states)]
        torch.stack(loss).sum().backward()
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in bank.heads[-1].parameters()])


def test_a_head_in_a_bank_is_trained_as_alone() -> None:
    model = tiny_frozen()
    before = model.fingerprint
    assert torch.equal(trained(model, [0, 1, 3, 2]), trained(model, [2]))
    assert not torch.equal(trained(model, [1]), trained(model, [2]))
    del model.fingerprint
    assert model.fingerprint == before


def labelled(world: World, **options: Any) -> ModelTexts:
    text = options.pop("text", TextSource(world.fit, held_out=world.test))
    models = [world.model_x, world.model_y]
    return labelled_texts(**{"models": models, "text": text, "batch_size": 16, "max_length": 60} | options)


def evaluated(data: ModelTexts, heads: bool, **options: Any) -> SurgeryEvaluation:
    evaluation = SurgeryEvaluation(FinetuningRecipe(learning_rate=1e-2), heads)
    trainer = quiet_trainer(**{"max_epochs": 2} | options)
    if heads:
        trainer.fit(evaluation, datamodule=data)
    trainer.test(evaluation, datamodule=data, verbose=False)
    return evaluation


def figures(evaluation: SurgeryEvaluation, column: str = "accuracy") -> dict[tuple[Any, ...], float]:
    return {(r["model"], r["kind"], r["site"], r["first"], r["last"]): r[column] for r in evaluation.rows}


def test_every_truncation_and_every_span_is_a_condition() -> None:
    found = conditions(3, base=False, heads=True)
    assert [c.kind for c in found] == ["native"] + ["untuned"] * 4 + ["skip"] * 6 + ["tuned"] * 4
    assert {(c.first, c.last) for c in found if c.kind == "skip"} == {(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3)}
    assert [(c.first, c.last) for c in found if c.kind == "untuned"] == [(1, 3), (2, 3), (3, 3), (None, None)]
    assert {c.kind for c in conditions(3, base=True, heads=True)} == {"tuned_orig"}
    assert "tuned" not in {c.kind for c in conditions(3, base=False, heads=False)}


def test_figures_are_those_of_the_views_one_by_one_in_batches_of_any_size(world: World) -> None:
    data = labelled(world)
    evaluation, other = evaluated(data, heads=False), evaluated(labelled(world, batch_size=3), heads=False)
    found = figures(evaluation, "loss")
    assert figures(other, "loss") == pytest.approx(found, rel=1e-5)
    assert figures(other) == figures(evaluation)
    batch = data.split("test")[list(range(TEST_TEXTS))]
    for model in data.frozen:
        views = {("untuned", site, site + 1, 3): (site, 3) for site in range(3)}
        views |= {("skip", None, i, j): (i - 1, j) for i in range(1, 4) for j in range(i, 4)}
        views |= {(kind, 3, None, None): (3, 3) for kind in ("untuned", "native")}
        for condition, (read, injected) in views.items():
            (states,) = model.front(batch.inputs[0], [read])
            logits = model.tail(batch.inputs[0], injected, states)
            expected = torch.nn.functional.cross_entropy(logits, batch.labels)
            assert found[(model.name, *condition)] == pytest.approx(float(expected), rel=1e-4), condition
    for key, value in found.items():
        if key[0] == MEAN:
            both = [found[(model.name, *key[1:])] for model in data.frozen]
            assert value == pytest.approx(sum(both) / 2)
    assert sum(key[0] == MEAN for key in found) == len(views)
    assert 0.5 <= evaluation.meta["majority_score"] < 1
    assert [model["name"] for model in evaluation.meta["models"]] == [world.model_x, world.model_y]
    assert {row["n_texts"] for row in evaluation.rows} == {TEST_TEXTS}
    assert all(row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"] for row in evaluation.rows)


def test_trained_heads_do_better_than_the_model_s_own_and_leave_models_alone(world: World) -> None:
    data = labelled(world, models=world.model_x, bases=[world.model_y])
    before = [model.fingerprint for model in data.frozen]
    losses = figures(evaluated(data, heads=True, max_epochs=4), "loss")
    for site in range(4):
        ends = (site + 1, 3) if site < 3 else (None, None)
        assert losses[(world.model_x, "tuned", site, *ends)] < losses[(world.model_x, "untuned", site, *ends)]
        assert (world.model_y, "tuned_orig", site, *ends) in losses
    for model in data.frozen:
        del model.fingerprint
    assert [model.fingerprint for model in data.frozen] == before


def test_the_losses_of_heads_are_logged_every_few_steps(world: World, tmp_path: Path) -> None:
    found, loss = {}, "tuned/0/1/train_loss"
    for often in (1, 4):
        logger = CSVLogger(tmp_path, name=str(often), version="")
        trainer = quiet_trainer(max_steps=10, log_every_n_steps=often, logger=logger)
        trainer.fit(SurgeryEvaluation(FinetuningRecipe(), heads=True), datamodule=labelled(world, models=world.model_x))
        with (tmp_path / str(often) / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        found[often] = {int(row["step"]): row[loss] for row in rows if row.get(loss)}
    assert list(found[1]) == list(range(10))
    assert found[4] == {step: found[1][step] for step in (3, 7)}


def test_a_broken_model_fails_its_self_test(world: World) -> None:
    data = labelled(world, models=world.model_x)
    calls = iter(range(100))
    data.frozen[0].blocks[1].register_forward_hook(lambda part, args, out: out + next(calls))
    with pytest.raises(RuntimeError, match="Injecting what was read at site"):
        evaluated(data, heads=False)


def test_models_of_different_depth_have_no_mean(world: World, tmp_path: Path) -> None:
    short = str(tiny_folder(tmp_path / "short", layers=2))
    evaluation = evaluated(labelled(world, models=[world.model_x, short]), heads=False)
    assert {row["model"] for row in evaluation.rows} == {world.model_x, short}


def test_bases_without_heads_and_more_classes_than_a_head_knows_are_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no `bases`, as no heads are trained"):
        evaluated(labelled(world, bases=world.model_x), heads=False)
    text = TextSource(write_texts(tmp_path / "three.csv", sentences(80), [0, 1, 2, 1] * 20))
    with pytest.raises(ValueError, match=r"Expected labels 0..1, as the head of .* has"):
        evaluated(labelled(world, text=text), heads=False)
