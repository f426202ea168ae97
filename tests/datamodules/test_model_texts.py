from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from datamodules.asking import TaskBatch
from datamodules.model_texts import ModelTexts, labelled_texts
from datamodules.text.sources import TextSource
from tests.datamodules.tokens.splitters import splitter_folder, word_piece
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


def test_sites_that_a_model_does_not_have_are_refused(world: World) -> None:
    for sites, says in (([4], "between 0 and 3, but got 4"), (["1:4"], "got 4"), ([-1], "got -1")):
        with pytest.raises(ValueError, match=says):
            model_texts(world, sites=sites).check_models()
    third = [world.model_x, world.model_y, world.model_x]
    with pytest.raises(ValueError, match="got 5"):
        model_texts(world, models=third, sites=["5:1"]).check_models()


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
    with pytest.raises(ValueError, match=r"needs labels, but the texts of .* have none\. Name a `label_column`"):
        labelled(world, text=TextSource(str(plain))).setup("fit")


# ---------------------------------------------------------------------- labelled texts


def labelled(world: World, **options: Any) -> ModelTexts:
    text = options.pop("text", TextSource(world.fit, held_out=world.test))
    return labelled_texts(**{"models": world.model_x, "text": text, "batch_size": 16, "max_length": 60} | options)


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
    text = TextSource(
        write_texts(tmp_path / "fit.csv", texts[20:], [0, 1, 1] * 20),
        held_out=write_texts(tmp_path / "test.csv", texts[:20], [0] * 15 + [1] * 5),
    )
    data = labelled(world, text=text)
    assert data.constant_answers().tolist() == [1] * 20
    assert data.texts.constant_label(regression=False) == 1
    assert data.texts.constant_label(regression=True) == pytest.approx(
        sum(data.texts.fit["label"]) / len(data.texts.fit)
    )


def test_a_base_needs_a_classifier_to_answer_like(tmp_path: Path, world: World) -> None:
    bare = str(tiny_folder(tmp_path / "bare", n_labels=None))
    with pytest.raises(ValueError, match="`models` to be classifiers where `bases` are named"):
        _ = labelled(world, models=bare, bases=world.model_x).frozen
