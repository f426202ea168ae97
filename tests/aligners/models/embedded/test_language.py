from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer
from transformers.activations import ACT2FN

from aligners.models import load_frozen
from aligners.models.embedded.kinds import END_OF_TEXT, byte_pairs
from aligners.models.embedded.recipes import GPTRecipe, MaskedRecipe, Recipe, embedded_model, embedded_recipe

GPT = GPTRecipe(vocabulary=300, layers=2, width=16, max_length=16, steps=30, batch=8)
MASKED = MaskedRecipe(vocabulary=100, layers=1, width=16, max_length=16, steps=30, batch=8)


def corpus() -> list[str]:
    """Sentences in which every word tells the next one."""
    draw = np.random.default_rng(0)
    words = ["the", "film", "that", "was", "very", "long", "and", "dull"]
    return [" ".join(words[draw.integers(3) :]) for _ in range(60)]


TEXTS = corpus()


def make(cache: Path, recipe: GPTRecipe | MaskedRecipe, seed: int = 0, texts: list[str] = TEXTS) -> Path:
    return embedded_model(seed, texts, recipe=recipe, cache=cache, progress=False)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_a_gpt_is_an_ordinary_folder(cache: Path) -> None:
    folder = make(cache, GPT)
    assert folder.parent.name.startswith("gpt2-gelu_new-2x16-")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (model.config.n_layer, model.config.n_embd, model.config.n_positions) == (2, 16, 16)
    assert len(tokenizer) == model.config.vocab_size <= 300
    assert tokenizer.model_max_length == 16
    assert tokenizer.eos_token == tokenizer.pad_token == END_OF_TEXT
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == model.config.pad_token_id
    for text in ("The film — naïve, 日本", "  two  spaces\n"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos_token_id not in ids


def test_a_masked_bert_is_an_ordinary_folder(cache: Path) -> None:
    folder = make(cache, MASKED)
    assert folder.parent.name.startswith("bert-mlm-1x16-")
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size <= 100
    assert tokenizer.convert_ids_to_tokens(tokenizer("The FILM")["input_ids"]) == ["[CLS]", "the", "film", "[SEP]"]


@pytest.mark.parametrize("recipe", [GPT, MASKED], ids=["gpt", "masked"])
def test_same_seed_gives_the_same_weights_and_another_seed_others(
    recipe: GPTRecipe | MaskedRecipe, cache: Path, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, again = make(cache, recipe), make(tmp_path, recipe)
    assert torch.equal(torch.get_rng_state(), before)
    other = make(cache, recipe, seed=1)
    assert one.parent == other.parent
    tensors = [load_file(folder / "model.safetensors") for folder in (one, again, other)]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    assert not all(torch.equal(tensors[0][name], tensors[2][name]) for name in tensors[0])
    for name in ("tokenizer.json", "config.json"):
        assert (one / name).read_bytes() == (again / name).read_bytes() == (other / name).read_bytes()


def test_a_gpt_learns_what_comes_next(tmp_path: Path) -> None:
    folder = make(tmp_path, replace(GPT, steps=120, learning_rate=2e-2))
    model = load_frozen(folder)
    ids = model.tokenizer(f"{END_OF_TEXT}the film that was very long and dull", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model.model(ids).logits
    loss = torch.nn.functional.cross_entropy(logits[0, 1:-1], ids[0, 2:])
    assert loss < 0.3


def test_a_masked_model_learns_what_is_hidden(tmp_path: Path) -> None:
    folder = make(tmp_path, replace(MASKED, steps=200, learning_rate=2e-2))
    model = load_frozen(folder)
    inputs = model.tokenizer("the film that was [MASK] long and dull", return_tensors="pt")
    with torch.no_grad():
        logits = model.model(**inputs).logits[0]
    hidden = int((inputs["input_ids"][0] == model.tokenizer.mask_token_id).nonzero())
    assert model.tokenizer.convert_ids_to_tokens(int(logits[hidden].argmax())) == "very"


def test_a_solu_gpt_is_read_and_injected_exactly(cache: Path) -> None:
    folder = make(cache, replace(GPT, activation="solu"))
    ACT2FN.pop("solu")  # as in a process that has made none
    model = load_frozen(folder)
    assert type(model.model.transformer.h[0].mlp.act).__name__ == "SoLU"  # type: ignore[union-attr]
    inputs = model.tokenizer(["the film", "very long and dull"], padding=True, return_tensors="pt")
    model.self_test(dict(inputs))
    plain = load_frozen(make(cache, GPT))
    assert folder.parent != make(cache, GPT).parent
    assert model.tokenizer.get_vocab() == plain.tokenizer.get_vocab()


def test_the_tokenizer_follows_from_the_texts() -> None:
    made = [byte_pairs(TEXTS, 300, 16).get_vocab() for _ in range(3)]
    assert made[0] == made[1] == made[2]
    with pytest.raises(ValueError, match=r"`vocabulary` to be at least 257.*got 256"):
        byte_pairs(TEXTS, 256, 16)


def test_sequences_are_the_texts_end_to_end_and_no_more_than_are_read() -> None:
    tokenizer = byte_pairs(TEXTS, 300, 16)
    end = tokenizer.eos_token_id
    flat = [i for text in TEXTS for i in [*tokenizer(text)["input_ids"], end]]
    rows = replace(GPT, steps=2, batch=3).sequences(TEXTS, tokenizer, end, 16)
    assert rows.shape == (6, 16)
    assert rows.flatten().tolist() == flat[:96]
    every = replace(GPT, steps=1000).sequences(TEXTS, tokenizer, end, 16)
    assert len(every) == len(flat) // 16


def test_every_sequence_is_read_as_often_as_any_other() -> None:
    rows, recipe = torch.arange(10)[:, None], replace(GPT, steps=6, batch=4)
    read = [batch["input_ids"].flatten() for batch in
            recipe.batches(rows, 3, lambda each: {"input_ids": torch.stack(each)})]  # fmt: skip
    counts = torch.bincount(torch.cat(read), minlength=10)
    assert [len(batch) for batch in read] == [4] * 6
    assert counts.min() == math.floor(24 / 10)
    assert counts.max() == math.ceil(24 / 10)


def test_names() -> None:
    mine = Recipe(width=32)
    assert embedded_recipe("embedded-gpt:3", mine) == (3, GPTRecipe())
    assert embedded_recipe("embedded-gpt:0:activation=solu,layers=4", mine) == (
        0, GPTRecipe(activation="solu", layers=4)
    )  # fmt: skip
    assert embedded_recipe("embedded-mlm:1:masked_share=.2", mine) == (1, MaskedRecipe(masked_share=0.2))
    assert embedded_recipe("embedded:1", mine) == (1, mine)
    with pytest.raises(ValueError, match=r"`embedded-gpt:SEED`.*vocabulary.*activation, each once.*'embedded-gpt:x'"):
        embedded_recipe("embedded-gpt:x", mine)
    with pytest.raises(ValueError, match="masked_share, initial, each once"):
        embedded_recipe("embedded-mlm:0:activation=solu", mine)


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`activation` to be one of gelu_new, solu, but got 'relu'"):
        make(tmp_path, replace(GPT, activation="relu"))
    with pytest.raises(ValueError, match="`texts` to train on"):
        make(tmp_path, GPT, texts=[])
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"at least 16 tokens together.*got"):
        make(tmp_path, GPT, texts=["a"])


def test_screen_says_what_is_made_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = replace(GPT, layers=1, steps=2)
    folder = embedded_model(4, TEXTS, recipe=recipe, cache=tmp_path)
    out, err = capfd.readouterr()
    assert "seed 4 (gpt2-gelu_new, 1 blocks, 16 wide, 2 batches of 8 x 16 tokens)" in out
    assert str(folder) in out
    for noise in ("attention_mask", "loss_type", "GPU", "num_workers", "longer than"):
        assert noise not in out + err
