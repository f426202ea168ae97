from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from datamodules.asking import TaskBatch
from datamodules.model_texts import ModelTexts, labelled_texts
from datamodules.text.sources import TextSource
from tests.runs import quiet_trainer
from tests.stitches import model_texts
from tests.tiny import tiny_folder
from tests.world import TEST_TEXTS, World, sentences, write_texts


def batches(data: ModelTexts, split: Any = "test", epoch: int = 0, **options: Any) -> list[TaskBatch]:
    return [data.prepare(texts, epoch) for texts in data.loader(split, **options)]


def asked(found: list[TaskBatch]) -> dict[int, tuple[list[int], list[int]]]:
    """Text -> where in it something is asked, counted without padding, and what."""
    units: dict[int, tuple[list[int], list[int]]] = {}
    for batch in found:
        mask, targets = batch.inputs["attention_mask"], batch.targets
        within = targets.index - targets.owner * mask.shape[1] - mask.argmax(1)[targets.owner]
        for text, place, answer in zip(batch.texts.text[targets.owner], within, targets.answer, strict=True):
            places, answers = units.setdefault(int(text), ([], []))
            places.append(int(place))
            answers.append(int(answer))
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


def test_masks_follow_from_the_text_and_the_options(world: World, masked: list[str], causal: list[str]) -> None:
    data = model_texts(world, models=masked)
    found = batches(data)
    assert asked(found) == asked(batches(data, batch_size=5))
    assert tokens(found) == tokens(batches(data, batch_size=5))
    plain = {int(n): ids for b in data.loader("test") for n, ids in zip(b.text, b.inputs_x["input_ids"], strict=True)}
    for text, (places, answers) in asked(found).items():
        assert answers == [int(plain[text][place]) for place in places]
    assert all(batch.texts.inputs[1] is batch.inputs for batch in found)
    assert asked(batches(model_texts(world, models=masked, seed=1))) != asked(found)
    more = asked(batches(model_texts(world, models=masked, masked_share=0.5)))
    assert sum(len(places) for places, _ in more.values()) > 2 * sum(len(places) for places, _ in asked(found).values())
    following = batches(model_texts(world, models=causal, sites=[1]))
    seen = tokens(following)
    for text, (places, answers) in asked(following).items():
        assert (places, answers) == (list(range(len(seen[text]) - 1)), seen[text][1:])


def test_training_texts_are_masked_anew_in_every_epoch_and_others_never(world: World, masked: list[str]) -> None:
    data = model_texts(world, models=masked)
    texts, plain, first = list(data.loader("fit")), batches(data, "fit"), batches(data, "fit", epoch=1)

    def seen(epoch: int, *, training: bool) -> dict[int, tuple[list[int], list[int]]]:
        data.trainer = SimpleNamespace(training=training, current_epoch=epoch)  # type: ignore[assignment]
        return asked([data.on_before_batch_transfer(batch, 0) for batch in texts])  # type: ignore[misc]

    assert seen(0, training=True) == asked(first) != seen(1, training=True)
    assert seen(0, training=False) == seen(1, training=False) == asked(plain) != asked(first)


def test_models_that_cannot_be_stitched_are_refused(world: World, folders: list[str], tmp_path: Path) -> None:
    x, y, unmasked = world.model_x, world.model_y, str(tiny_folder(tmp_path, task="masked"))
    for models, sites, says in (
        ([x, y], [4], "between 0 and 3, but got 4"),
        ([x, y], ["1:4"], "got 4"),
        ([x, y], [-1], "got -1"),
        ([x, y, x], ["5:1"], "got 5"),
        ([x, folders[0]], [1], r"Stitching puts the state of a token.*tokenizers of .*choose models of one"),
        ([unmasked, unmasked], [1], r"tokenizer with a mask token.*has none. Set its `mask_token`"),
    ):
        with pytest.raises(ValueError, match=says):
            model_texts(world, models=models, sites=sites).check_models()


def test_a_classification_without_labels_is_refused(world: World, tmp_path: Path) -> None:
    plain = tmp_path / "plain.csv"
    plain.write_text("\n".join(["text", *sentences(80)]))
    with pytest.raises(ValueError, match=r"classification needs labels.*`label_column`"):
        batches(model_texts(world, text=TextSource(str(plain))))
    with pytest.raises(ValueError, match=r"needs labels, but the texts of .* have none\. Name a `label_column`"):
        labelled(world, text=TextSource(str(plain))).setup("fit")


# ---------------------------------------------------------------------- labelled texts


def labelled(world: World, **options: Any) -> ModelTexts:
    given = {"models": world.model_x, "text": world.text, "batch_size": 16, "max_length": 60}
    return labelled_texts(**given | options)


def test_every_text_comes_once_with_its_class(world: World) -> None:
    data = labelled(world, models=[world.model_x, world.model_y])
    batches = list(data.loader("test"))
    assert sorted(torch.cat([batch.text for batch in batches]).tolist()) == list(range(TEST_TEXTS))
    for batch in batches:
        assert torch.equal(batch.labels, data.answers("test")[batch.text])
        assert len(batch.inputs) == 2
        assert batch.inputs[0] is batch.inputs[1]  # one tokenizer
    assert data.classes == 2


def test_bases_come_after_the_models_under_heads_of_their_own(world: World) -> None:
    data = labelled(world, bases=[world.model_x], seed=3)
    tuned, base = data.frozen
    batch = next(iter(data.loader("test")))
    assert torch.equal(tuned.front(batch.inputs[0], [3])[0], base.front(batch.inputs[1], [3])[0])
    assert not torch.equal(tuned.logits(batch.inputs[0]), base.logits(batch.inputs[1]))
    assert [model["name"] for model in data.describe()["bases"]] == [world.model_x]
    assert labelled(world, bases=world.model_x, seed=3).frozen[1].fingerprint == base.fingerprint


def test_the_order_of_training_follows_from_its_seed(world: World) -> None:
    data, orders = labelled(world), []
    for order in (0, 1, 0):
        data.reorder(order)
        data.trainer = quiet_trainer()
        orders.append([batch.text.tolist() for batch in data.train_dataloader()])
    assert orders[0] == orders[2]
    assert orders[0] != orders[1]


def test_the_majority_is_that_of_the_fitting_texts(tmp_path: Path, world: World) -> None:
    texts = sentences(80)
    fit = write_texts(tmp_path / "fit.csv", texts[20:], [0, 1, 1] * 20)
    held_out = write_texts(tmp_path / "test.csv", texts[:20], [0] * 15 + [1] * 5)
    data = labelled(world, text=TextSource(fit, held_out=held_out))
    assert data.constant_answers().tolist() == [1] * 20
    assert data.texts.constant_label(regression=False) == 1
    mean = sum(data.texts.fit["label"]) / len(data.texts.fit)
    assert data.texts.constant_label(regression=True) == pytest.approx(mean)


def test_a_base_needs_a_classifier_to_answer_like(tmp_path: Path, world: World) -> None:
    bare = str(tiny_folder(tmp_path / "bare", n_labels=None))
    with pytest.raises(ValueError, match="`models` to be classifiers where `bases` are named"):
        _ = labelled(world, models=bare, bases=world.model_x).frozen
