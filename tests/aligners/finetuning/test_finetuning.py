"""Fine-tuning: what is frozen or left out, training and measuring, and the folders of finished classifiers."""

import copy
import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from datasets import Dataset
from lightning.pytorch.loggers import CSVLogger
from tests.runs import quiet_trainer
from tests.tiny import tiny_model, tiny_tokenizer
from tests.world import World
from transformers import PreTrainedModel

from aligners.datamodules.model_texts import ModelTexts, labelled_texts
from aligners.datamodules.task_targets import classification_targets
from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.text.texts import FittedTexts
from aligners.finetuning.classifier_training import Finetuning, FinetuningRecipe, mean_loss
from aligners.finetuning.jobs import FINISHED, Variant, finished_row, parse_variants, save_classifier
from aligners.injection.scoring.task_scores import unit_answers
from aligners.models import FrozenModel, load_frozen
from aligners.models.classifiers import freeze

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


def test_its_loss_is_logged_every_few_steps(data: ModelTexts, tmp_path: Path) -> None:
    found = {}
    for often in (1, 4):
        logger = CSVLogger(tmp_path, name=str(often), version="")
        module = trained(data, tiny_model("bert"), max_steps=10, log_every_n_steps=often, logger=logger)
        loss = f"{module.name}/train_loss"
        with (tmp_path / str(often) / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        found[often] = {int(row["step"]): row[loss] for row in rows if row.get(loss)}
    assert list(found[1]) == list(range(10))
    assert found[4] == {step: found[1][step] for step in (3, 7)}


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
    freeze(model, "bottom", 3)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Finetuning(model, FinetuningRecipe(1e-2, weight_decay=0.1, warmup=2)), datamodule=data)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"}
    decay = [
        (group["weight_decay"], [weight.ndim for weight in group["params"]])
        for group in trainer.optimizers[0].param_groups
    ]
    assert decay == [(0.1, [2, 2]), (0.0, [1, 1])]


def test_what_cannot_train_is_refused(data: ModelTexts) -> None:
    model = tiny_model("bert")
    with pytest.raises(ValueError, match=r"`trainer.max_epochs` or `trainer.max_steps` to be finite"):
        trained(data, model, max_epochs=-1)
    with pytest.raises(ValueError, match="`warmup` of at most 11, all steps, but got 1000"):
        trained(data, model, recipe=FinetuningRecipe(warmup=1000))
    model.classifier.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="finite training loss, but batch 0 holds NaN or infinity at finetune"):
        trained(data, model)


def test_losses_are_means_over_texts() -> None:
    logits, labels = torch.randn(2, 5, 3), torch.tensor([0, 1, 2, 1, 0])
    module = Finetuning(tiny_model("bert"))
    module._trainer = quiet_trainer()
    expected = torch.stack([torch.nn.functional.cross_entropy(each, labels) for each in logits])
    assert torch.allclose(mean_loss(module, logits, labels), expected)


def test_what_is_written_is_what_is_tried_each_once() -> None:
    for written, names in (
        (["none", "top:2", " bottom:0", "none"], ["none", "top-2", "bottom-0"]),
        (["bottom:all"], ["none", "bottom-0", "bottom-1", "bottom-2", "bottom-3"]),
        (["top:all", "none"], ["none", "top-1", "top-2", "top-3"]),
        (["layers:all"], ["layers-1", "layers-2", "layers-3"]),
    ):
        assert [variant.name for variant in parse_variants(written, 3)] == names


def test_variants_freeze_and_shorten() -> None:
    for variant, blocks in ((Variant(), "012"), (Variant("bottom", 2), "2"), (Variant("top", 1), "01")):
        model = tiny_model("bert").requires_grad_(True)
        variant.apply(model)
        training = [name for name, weight in model.named_parameters() if ".layer." in name and weight.requires_grad]
        assert {name.split(".")[3] for name in training} == set(blocks)
    model = tiny_model("bert")
    assert Variant("layers", 2).apply(model).config.num_hidden_layers == 2
    assert model.config.num_hidden_layers == 3


FITTED = FittedTexts.of({}, Dataset.from_dict({"text": ["a film"]}))
ROW = {"accuracy": 0.5, "base": "x", "base_fingerprint": "abc"}


def test_a_saved_classifier_is_whole_and_recognised_and_anything_else_is_refused(tmp_path: Path) -> None:
    folder, model = tmp_path / "none" / "seed-0", tiny_model("bert")
    assert finished_row(folder, "abc") is None
    with pytest.raises(ValueError, match="Out of range float"):
        save_classifier(folder, model, tiny_tokenizer(), ROW | {"accuracy": float("nan")}, FITTED)
    assert list((tmp_path / "none").iterdir()) == []
    save_classifier(folder, model, tiny_tokenizer(), ROW, FITTED)
    assert [path.name for path in (tmp_path / "none").iterdir()] == ["seed-0"]
    assert finished_row(folder, "abc") == ROW
    assert torch.equal(load_frozen(folder).model.classifier.weight, model.classifier.weight)
    with pytest.raises(ValueError, match=r"fine-tuned from x with the fingerprint abc, but the base model's is other"):
        finished_row(folder, "other")
    (folder / FINISHED).write_text('{"accuracy": 0.')
    with pytest.raises(ValueError, match=rf"{FINISHED} is damaged: .*Move"):
        finished_row(folder, "abc")
    with pytest.raises(ValueError, match=rf"to hold a fine-tuned classifier with its {FINISHED}"):
        finished_row(tmp_path, "abc")
