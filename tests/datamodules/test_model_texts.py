from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from aligners.models.embedded.recipes import Recipe
from datamodules import frozen_models
from datamodules.asking import TaskBatch
from datamodules.model_texts import ModelTexts, stitched_texts
from datamodules.text.sources import TextSource
from tests.datamodules.tokens.splitters import splitter_folder, word_piece
from tests.runs import made_again, quiet_trainer
from tests.stitches import model_texts
from tests.tiny import tiny_folder
from tests.world import TEST_TEXTS, World, sentences


def batches(data: ModelTexts, split: Any = "test", epoch: int = 0, **options: Any) -> list[TaskBatch]:
    return [data.prepare(texts, epoch) for texts in data.loader(split, **options)]


def asked(found: list[TaskBatch]) -> dict[int, tuple[list[int], list[int]]]:
    """Text -> where in it something is asked, counted without padding, and what."""
    units: dict[int, tuple[list[int], list[int]]] = {}
    for batch in found:
        mask = batch.inputs["attention_mask"]
        first = mask.argmax(1)
        targets = (getattr(batch.targets, name).tolist() for name in ("index", "answer", "owner"))
        for index, answer, owner in zip(*targets, strict=True):
            places, answers = units.setdefault(int(batch.texts.text[owner]), ([], []))
            places.append(index - owner * mask.shape[1] - int(first[owner]))
            answers.append(answer)
    return units


def tokens(found: list[TaskBatch]) -> dict[int, list[int]]:
    """Text -> what the models see of it."""
    return {
        int(number): ids[mask.bool()].tolist()
        for batch in found
        for number, ids, mask in zip(
            batch.texts.text, batch.inputs["input_ids"], batch.inputs["attention_mask"], strict=True
        )
    }


def test_every_real_token_is_a_row_and_every_text_is_asked_its_class(world: World) -> None:
    data = model_texts(world)
    found = batches(data)
    labels = data.split("test").labels
    assert labels is not None
    for batch in found:
        mask = batch.inputs["attention_mask"].bool()
        assert torch.equal(batch.rows.index, mask.flatten().nonzero()[:, 0])
        assert torch.equal(batch.targets.answer, labels[batch.texts.text])
        assert batch.texts.inputs[-1] is batch.inputs
    assert sorted(torch.cat([batch.texts.text for batch in found]).tolist()) == list(range(TEST_TEXTS))
    assert data.task == "classification"


def test_a_language_model_is_asked_for_the_next_token(world: World, causal: list[str]) -> None:
    found = batches(model_texts(world, models=causal, sites=[1]))
    seen = tokens(found)
    for text, (places, answers) in asked(found).items():
        assert places == list(range(len(seen[text]) - 1))
        assert answers == seen[text][1:]


def test_packed_text_is_cut_into_sequences_without_padding(
    world: World, causal: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    data = model_texts(world, models=causal, sites=[1], packed=True, max_length=16)
    with caplog.at_level(logging.WARNING, "datamodules.tokens.splits"):
        found = batches(data)
    assert "do not fill one and are dropped" in caplog.text
    ids = torch.cat([batch.inputs["input_ids"] for batch in found])
    assert ids.shape[1] == 16
    assert all(bool(batch.inputs["attention_mask"].all()) for batch in found)
    assert sum(len(batch.targets) for batch in found) == 15 * len(ids)
    texts = data.texts.test["text"][:]
    of_each = data.frozen[0].tokenizer(texts, add_special_tokens=False)["input_ids"]  # type: ignore[misc]
    stream = [token for ids_of_text in of_each for token in [*ids_of_text, 2]]
    order = torch.cat([batch.texts.text for batch in found]).argsort()
    assert ids[order].flatten().tolist() == stream[: ids.numel()]
    assert len(stream) - ids.numel() == data.describe()["packed"]["test"]["dropped"] < 16
    assert data.bytes_per_token("test") == pytest.approx(sum(len(text) for text in texts) / len(stream))


def test_masks_follow_from_the_text_and_the_epoch_alone(world: World, masked: list[str]) -> None:
    data = model_texts(world, models=masked)
    found, other = batches(data), batches(data, batch_size=5)
    assert asked(found) == asked(other)
    assert tokens(found) == tokens(other)
    plain = {int(n): ids for b in data.loader("test") for n, ids in zip(b.text, b.inputs_x["input_ids"], strict=True)}
    for text, (places, answers) in asked(found).items():
        assert answers == [int(plain[text][place]) for place in places]
    assert all(batch.texts.inputs[1] is batch.inputs for batch in found)
    anew = batches(data, epoch=1)
    assert asked(anew) != asked(found)
    assert asked(anew) == asked(batches(data, epoch=1, batch_size=3))
    assert asked(batches(model_texts(world, models=masked, seed=1))) != asked(found)
    more = asked(batches(model_texts(world, models=masked, masked_share=0.5)))
    assert sum(len(places) for places, _ in more.values()) > 2 * sum(len(places) for places, _ in asked(found).values())


class Watching(pl.LightningModule):
    """Keeps what a Trainer hands it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.train_batches: list[TaskBatch] = []
        self.validation_batches: list[TaskBatch] = []

    def training_step(self, batch: TaskBatch, batch_idx: int) -> Tensor:
        self.train_batches.append(batch)
        return self.weight

    def validation_step(self, batch: TaskBatch, batch_idx: int) -> None:
        self.validation_batches.append(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_trainer_masks_training_texts_anew_in_every_epoch_and_others_never(world: World, masked: list[str]) -> None:
    module, data = Watching(), model_texts(world, models=masked)
    quiet_trainer(max_epochs=2).fit(module, datamodule=data)
    steps = len(module.train_batches) // 2
    epochs = [asked(module.train_batches[:steps]), asked(module.train_batches[steps:])]
    assert epochs[0].keys() == epochs[1].keys()
    assert epochs[0] != epochs[1]
    assert epochs[0] == asked(batches(data, "fit", epoch=1))
    half = len(module.validation_batches) // 2
    first, second = asked(module.validation_batches[:half]), asked(module.validation_batches[half:])
    assert first == second == asked(batches(data, "validation"))


def test_ranks_share_the_texts_and_mask_them_alike(world: World, masked: list[str]) -> None:
    data = model_texts(world, models=masked)
    alone = batches(data)
    found = []
    for rank in range(2):
        strategy = SimpleNamespace(root_device=torch.device("cpu"))
        data.trainer = SimpleNamespace(global_rank=rank, world_size=2, strategy=strategy)  # type: ignore[assignment]
        found += batches(data)
    assert asked(found) == asked(alone)
    assert sum(len(batch.texts.text) for batch in found) == TEST_TEXTS


def test_its_options_make_it_again(world: World) -> None:
    data = model_texts(world, sites=["1:2"], recipe=Recipe(layers=2), cache=Path("some"), masked_share=0.3)
    again = made_again(stitched_texts, data.config())
    assert again.config() == data.config()
    assert (again.sites, again.frozen_models.recipe.layers, again.masked_share) == (["1:2"], 2, 0.3)
    about = data.describe()
    assert [model["name"] for model in about["models"]] == [world.model_x, world.model_y]
    assert "masked_share" not in about
    assert about["special_tokens"] is True


def test_a_model_that_is_named_twice_is_loaded_once(world: World) -> None:
    data = model_texts(world, models=[world.model_x, world.model_y, world.model_x])
    assert data.frozen[0] is data.frozen[2]
    assert data.frozen[0] is not data.frozen[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"models": ["one"]}, r"`models` to name at least two models, but got \['one'\]"),
        ({"revisions": ["main"]}, r"one of `revisions` for each of the 2 `models`, but got 1"),
        ({"masked_share": 1.0}, r"`masked_share` to be above 0 and below 1, but got 1\.0"),
        ({"batch_size": 0}, r"`batch_size` to be at least 1, but got 0"),
    ],
)
def test_bad_options_are_refused_at_once(world: World, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        model_texts(world, **options)


def test_sites_that_a_model_does_not_have_are_refused(world: World) -> None:
    for sites, says in (([4], "between 0 and 3, but got 4"), (["1:4"], "got 4"), ([-1], "got -1")):
        with pytest.raises(ValueError, match=says):
            model_texts(world, sites=sites).check_models()
    third = [world.model_x, world.model_y, world.model_x]
    with pytest.raises(ValueError, match="got 5"):
        model_texts(world, models=third, sites=["5:1"]).check_models()


def test_an_embedded_model_is_not_trained_for_sites_that_it_will_not_have(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was trained")

    monkeypatch.setattr(frozen_models, "embedded_model", trained)
    for models, says in (
        (["embedded:0", "embedded:1"], r"`sites` between 0 and L = \d+, the blocks of embedded:0, got 9"),
        (["embedded-gpt:0", "embedded-gpt:0:activation=solu"], r"blocks of embedded-gpt:0, got 9"),
    ):
        with pytest.raises(ValueError, match=says):
            model_texts(world, models=models, sites=["9:1"]).prepare_data()


def test_models_of_other_tokenizers_are_refused(world: World, tmp_path: Path) -> None:
    pieces = splitter_folder(tmp_path, word_piece(), seed=0, layers=3)
    with pytest.raises(ValueError, match=r"Stitching puts the state of a token.*tokenizers of .*choose models of one"):
        model_texts(world, models=[world.model_x, pieces]).check_models()


def test_a_tokenizer_that_cannot_mask_is_refused(world: World, tmp_path: Path) -> None:
    folder = str(tiny_folder(tmp_path, task="masked"))
    with pytest.raises(ValueError, match=r"tokenizer with a mask token.*has none. Set its `mask_token`"):
        model_texts(world, models=[folder, folder]).check_models()


def test_a_classification_without_labels_is_refused(world: World, tmp_path: Path) -> None:
    plain = tmp_path / "plain.csv"
    plain.write_text("\n".join(["text", *sentences(80)]))
    with pytest.raises(ValueError, match=r"classification needs labels.*`label_column`"):
        batches(model_texts(world, text=TextSource(str(plain))))
