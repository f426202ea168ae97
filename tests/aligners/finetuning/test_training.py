import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from transformers import PreTrainedModel

from aligners.finetuning.training import Finetuning, FinetuningRecipe, mean_loss
from aligners.injection.scoring.tasks import unit_answers
from aligners.models import FrozenModel
from aligners.models.truncation import freeze
from datamodules.asking import classification_targets
from datamodules.model_texts import ModelTexts, labelled_texts
from datamodules.text.sources import TextSource
from tests.runs import quiet_trainer
from tests.tiny import tiny_model
from tests.world import World

FAST = FinetuningRecipe(learning_rate=1e-2)


@pytest.fixture
def data(world: World) -> ModelTexts:
    text = TextSource(world.fit, held_out=world.test)
    return labelled_texts(world.model_x, text=text, batch_size=16, max_length=60)


def trained(data: ModelTexts, model: PreTrainedModel, seed: int = 0, **options: Any) -> Finetuning:
    module = Finetuning(model.requires_grad_(True), options.pop("recipe", FAST), seed=seed)
    trainer = quiet_trainer(**{"max_epochs": 1} | options)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    return module


def test_it_learns_the_task_and_measures_as_the_frozen_model(data: ModelTexts) -> None:
    recipe = FinetuningRecipe(learning_rate=1e-2, warmup=0.1)
    module = trained(data, tiny_model("bert", initializer_range=0.1), recipe=recipe, max_epochs=6)
    majority = (data.constant_answers() == data.answers("test")).double().mean()
    assert module.scores["correct"].mean() > majority + 0.1
    frozen = FrozenModel(module.model, name="tuned")
    batch = next(iter(data.loader("test")))
    found = unit_answers(frozen.logits(batch.inputs[0]), classification_targets(batch.labels))
    for name, values in found._asdict().items():
        assert torch.allclose(module.scores[name].flatten()[batch.text], values.double(), atol=1e-6), name
    validation = torch.cat(
        [(frozen.logits(batch.inputs[0]).argmax(-1) == batch.labels).float() for batch in data.loader("validation")]
    )
    assert module.validation_accuracy == pytest.approx(float(validation.mean()))


def test_the_same_seed_gives_the_same_weights_another_gives_others(data: ModelTexts) -> None:
    weights = []
    for seed in (0, 0, 1):
        model = tiny_model("bert", hidden_dropout_prob=0.5)
        weights.append(trained(data, model, seed).model.classifier.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_dropout_acts_while_it_trains_and_not_while_it_is_measured(data: ModelTexts) -> None:
    modes: dict[bool, set[bool]] = {True: set(), False: set()}
    model = tiny_model("bert")
    module = Finetuning(model.requires_grad_(True), FAST)

    class Watch(pl.Callback):
        """From the first batch on: what does not train is found before, by a forward pass with gradients."""

        def on_train_start(self, *_: Any) -> None:
            model.bert.register_forward_hook(lambda part, *_: modes[torch.is_grad_enabled()].add(part.training))

    trainer = quiet_trainer(max_epochs=2, callbacks=[Watch()])
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    assert modes == {True: {True}, False: {False}}


def test_what_is_frozen_stays_and_only_matrices_decay(data: ModelTexts) -> None:
    model = tiny_model("bert").requires_grad_(True)
    before = copy.deepcopy(model.state_dict())
    freeze(model, bottom=3)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Finetuning(model, FinetuningRecipe(1e-2, weight_decay=0.1, warmup=2)), datamodule=data)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"}
    decay = [
        (group["weight_decay"], [weight.ndim for weight in group["params"]])
        for group in trainer.optimizers[0].param_groups
    ]
    assert decay == [(0.1, [2, 2]), (0.0, [1, 1])]


def test_a_loss_that_is_not_finite_ends_the_run(data: ModelTexts) -> None:
    model = tiny_model("bert")
    model.classifier.weight.data[0, 0] = torch.nan
    with pytest.raises(
        ValueError, match="Expected finite training loss, but batch 0 holds NaN or infinity at finetune"
    ):
        trained(data, model)


def test_the_learning_rate_needs_an_end(data: ModelTexts) -> None:
    with pytest.raises(ValueError, match=r"`trainer.max_epochs` or `trainer.max_steps` to be finite"):
        trained(data, tiny_model("bert"), max_epochs=-1)
    with pytest.raises(ValueError, match="`warmup` of at most 11, all steps, but got 1000"):
        trained(data, tiny_model("bert"), recipe=FinetuningRecipe(warmup=1000))


def test_losses_are_means_over_texts() -> None:
    logits, labels = torch.randn(2, 5, 3), torch.tensor([0, 1, 2, 1, 0])
    module = Finetuning(tiny_model("bert"))
    module._trainer = quiet_trainer()
    expected = torch.stack([torch.nn.functional.cross_entropy(each, labels) for each in logits])
    assert torch.allclose(mean_loss(module, logits, labels), expected)
