from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.model_texts import ModelTexts, labelled_texts
from datamodules.text.sources import TextSource
from tests.runs import quiet_trainer
from tests.tiny import tiny_folder
from tests.world import TEST_TEXTS, World, sentences, write_texts


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


def test_text_without_classes_is_refused(tmp_path: Path, world: World) -> None:
    plain = tmp_path / "plain.csv"
    plain.write_text("text\n" + "\n".join(sentences(60)))
    data = labelled(world, text=TextSource(str(plain)))
    with pytest.raises(ValueError, match="Name a `label_column`"):
        data.setup("fit")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"models": []}, "`models` to name at least one model"),
        ({"models": ["a", "b"], "revisions": ["main"]}, "one of `revisions` for each of the 2 `models`, but got 1"),
        ({"batch_size": 0}, "`batch_size` to be at least 1"),
        ({"seed": -1}, "`seed` to be at least 0"),
    ],
)
def test_options_out_of_range_are_refused(wrong: dict[str, Any], said: str, world: World) -> None:
    with pytest.raises(ValueError, match=said):
        labelled(world, **wrong)


def test_a_base_needs_a_classifier_to_answer_like(tmp_path: Path, world: World) -> None:
    bare = str(tiny_folder(tmp_path / "bare", n_labels=None))
    with pytest.raises(ValueError, match="`models` to be classifiers where `bases` are named"):
        _ = labelled(world, models=bare, bases=world.model_x).frozen
