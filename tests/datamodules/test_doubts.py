"""Texts that a tokenizer does not know, and models that do not know the texts, are said before any figure."""

from pathlib import Path

import torch
from tests.tiny import tiny_folder
from tests.world import World, sentences, write_texts

from aligners.datamodules.doubts import text_doubts
from aligners.datamodules.layers import LayerActivations
from aligners.datamodules.pairings import pair_states
from aligners.datamodules.text.sources import TextSource


def test_shares_are_those_of_tokens_that_are_not_special() -> None:
    ids = torch.tensor([0, 7, 7, 7, 7, 2, 0, 7, 5, 2])
    special = (ids == 0) | (ids == 2)
    lengths = torch.tensor([6, 4])
    assert text_doubts(ids, special, lengths, 7) == [
        "83% of their tokens are unknown to it",
        "83% of their 6 tokens are the same one, out of 2 different ones",
    ]
    twice = torch.tensor([0, 4, 5, 2, 0, 4, 5, 2])
    assert text_doubts(twice, (twice == 0) | (twice == 2), torch.tensor([4, 4]), 7) == [
        "50% of them are the same tokens as another text"
    ]
    assert text_doubts(twice[:4], special[:4], torch.tensor([4]), None) == []


def test_texts_outside_the_vocabulary_are_cautioned_about(world: World, tmp_path: Path) -> None:
    strange = [" ".join(f"{word}ово" for word in text.split()) for text in sentences(60)]
    data = pair_states(
        world.model_x, world.model_y, text=TextSource(write_texts(tmp_path / "strange.csv", strange)), max_length=32
    )
    data.setup("test")
    (caution,) = data.cautions  # one: both models have one tokenizer
    assert caution.startswith(
        "Caution: the held-out texts are hardly texts to the tokenizer of x: 100% of their tokens"
    )
    assert "are the same tokens as another text" in caution
    layers = LayerActivations([world.model_x, world.model_y], text=data.text, max_length=32)
    layers.setup("test")
    assert layers.cautions == [caution]
    plain = pair_states(world.model_x, world.model_y, text=world.text, max_length=32)
    plain.setup("test")
    assert plain.cautions == []


def test_a_language_model_worse_than_frequencies_is_cautioned_about(world: World, tmp_path: Path) -> None:
    models = [str(tiny_folder(tmp_path / "random", "gpt2", task="causal"))]
    data = LayerActivations(models, text=world.text, max_length=32)
    data.setup("test")
    assert not data.cautions  # nothing has been read yet
    data.loader("test")
    (caution,) = data.cautions
    assert caution.startswith("Caution: random predicts these texts worse than the frequencies of their tokens alone")


def test_embedded_models_do_not_depend_on_how_many_texts_are_read(world: World, tmp_path: Path) -> None:
    size = "vocabulary=270,layers=1,width=8,heads=1,steps=4,batch=4,max_length=32"
    made = set()
    for most in (None, 40):
        text = TextSource(world.fit, held_out=world.test, max_texts=most)
        data = LayerActivations([f"embedded-gpt:0:{size}"], text=text, max_length=32, cache=tmp_path)
        assert len(data.split("fit")) == (most or 170)
        made.add(data.frozen[0].fingerprint)
    assert len(made) == 1
