"""Models that are trained on first use: the same from the same seed, ordinary folders, and made once."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.special import softmax
from transformers import BertForSequenceClassification
from transformers.activations import ACT2FN

from aligners.models import FrozenModel, embedded, load_frozen
from aligners.models.architectures import SoLU, solu
from aligners.models.embedded import cache_folder, embedded_model
from aligners.models.recipes import (
    AnyRecipe,
    GPTRecipe,
    MaskedRecipe,
    Recipe,
    SentenceRecipe,
    embedded_recipe,
    recipe_in_names,
)
from aligners.models.tokenizers import END_OF_TEXT, byte_pairs, word_pieces

RECIPE = Recipe(vocabulary=200, layers=1, width=16, max_length=24, epochs=1, batch=20)
GPT = GPTRecipe(vocabulary=300, layers=2, width=16, max_length=16, steps=10, batch=8)
MASKED = MaskedRecipe(vocabulary=100, layers=1, width=16, max_length=16, steps=10, batch=8)
SENTENCES = SentenceRecipe(vocabulary=100, layers=1, width=16, max_length=24, epochs=1)


# Texts of two classes that words tell apart, and sentences in which every word tells the next one.
_DRAW, _WORDS = np.random.default_rng(0), (("dull", "flat", "stale"), ("bright", "moving", "fresh"))
_STARTS = np.random.default_rng(0).integers(3, size=60)
LABELS = [i % 2 for i in range(200)]
TEXTS = [" ".join(["the", "film", "is", *_DRAW.choice(_WORDS[k], size=1 + i % 9)]) for i, k in enumerate(LABELS)]
CHAINS = [" ".join(["the", "film", "that", "was", "very", "long", "and", "dull"][start:]) for start in _STARTS]


def make(cache: Path, recipe: AnyRecipe = RECIPE, seed: int = 0, **options: Any) -> Path:
    texts, labels = (TEXTS, LABELS) if isinstance(recipe, Recipe) else (CHAINS, None)
    return embedded_model(seed, texts, labels, recipe=recipe, cache=cache, **{"progress": False} | options)


def loaded(cache: Path, recipe: AnyRecipe) -> tuple[FrozenModel, Any, Any]:
    """A model, with itself in full and its tokenizer."""
    frozen = load_frozen(make(cache, recipe))
    return frozen, frozen.model, frozen.tokenizer


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(
    ("recipe", "begins", "head"),
    [
        (RECIPE, "bert-1x16-", "BertForSequenceClassification"),
        (GPT, "gpt2-gelu_new-2x16-", "GPT2LMHeadModel"),
        (MASKED, "bert-mlm-1x16-", "BertForMaskedLM"),
        (SENTENCES, "bert-sentences-1x16-", "BertForMaskedLM"),
    ],
    ids=["classifier", "gpt", "masked", "sentences"],
)
def test_a_seed_gives_an_ordinary_folder_with_the_same_weights(
    recipe: AnyRecipe, begins: str, head: str, cache: Path, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    one, again, other = make(cache, recipe), make(tmp_path, recipe), make(cache, recipe, seed=1)
    assert torch.equal(torch.get_rng_state(), before[0])  # the global states are left alone
    assert (np.random.get_state()[1] == before[1]).all()
    assert one.parent == other.parent
    assert one.parent.name.startswith(begins)
    tensors = [load_file(folder / "model.safetensors") for folder in (one, again, other)]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    assert not all(torch.equal(tensors[0][name], tensors[2][name]) for name in tensors[0])
    for name in ("tokenizer.json", "config.json"):
        assert (one / name).read_bytes() == (again / name).read_bytes() == (other / name).read_bytes()
    _, model, tokenizer = loaded(cache, recipe)
    assert type(model).__name__ == head
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (recipe.layers, 16)
    assert model.config.max_position_embeddings == tokenizer.model_max_length == recipe.max_length
    assert len(tokenizer) == model.config.vocab_size <= recipe.vocabulary
    assert tokenizer.pad_token_id == model.config.pad_token_id


def test_pieces_are_berts_or_all_bytes(cache: Path) -> None:
    _, _, tokenizer = loaded(cache, RECIPE)
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("The film is BRIGHT")["input_ids"])
    assert pieces == ["[CLS]", "the", "film", "is", "bright", "[SEP]"]
    assert tokenizer("film [MASK]")["input_ids"][2] == tokenizer.mask_token_id
    _, _, tokenizer = loaded(cache, GPT)
    assert tokenizer.eos_token == tokenizer.pad_token == END_OF_TEXT
    for text in ("The film — naïve, 日本", "  two  spaces\n"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos_token_id not in ids


def test_tokenizers_follow_from_the_texts() -> None:
    # The library's own trainer answers differently from call to call: its hash tables are seeded anew.
    for pieces, texts, size in ((word_pieces, TEXTS, 200), (byte_pairs, CHAINS, 300)):
        first, *others = [pieces(texts, size, 24).get_vocab() for _ in range(4)]
        assert all(vocabulary == first for vocabulary in others)
    with pytest.raises(ValueError, match=r"`vocabulary` to be at least 257.*got 256"):
        byte_pairs(CHAINS, 256, 16)


def test_each_kind_learns_its_task(tmp_path: Path) -> None:
    quick = Recipe(vocabulary=200, layers=1, width=16, epochs=4, batch=20, learning_rate=1e-2)
    _, model, tokenizer = loaded(tmp_path, quick)
    with torch.no_grad():
        right = model(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits.argmax(-1) == torch.tensor(LABELS)
    assert right.float().mean() > 0.95
    _, model, tokenizer = loaded(tmp_path, replace(GPT, steps=80, learning_rate=2e-2))
    ids = tokenizer(f"{END_OF_TEXT}the film that was very long and dull", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits
    assert torch.nn.functional.cross_entropy(logits[0, 1:-1], ids[0, 2:]) < 0.3
    masked = replace(MASKED, width=32, initial=0.2, steps=200, learning_rate=1e-2)
    for recipe in (masked, replace(SENTENCES, width=32, epochs=20, learning_rate=1e-2)):
        _, model, tokenizer = loaded(tmp_path, recipe)
        inputs = tokenizer("the film that was [MASK] long and dull", return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs).logits[inputs["input_ids"] == tokenizer.mask_token_id]
        assert logits.softmax(-1)[0, tokenizer.convert_tokens_to_ids("very")] > 0.5


def test_the_padding_of_sentences_is_not_read() -> None:
    model, batches, loss, _ = SENTENCES.plan(0, CHAINS, [], word_pieces(CHAINS, 100, 24))
    batch = next(iter(batches))
    fill = {"input_ids": 5, "attention_mask": 0, "labels": -100}
    wider = {name: torch.nn.functional.pad(batch[name], (0, 3), value=value) for name, value in fill.items()}
    torch.testing.assert_close(loss(model, wider), loss(model, batch))


def test_solu_is_the_normalised_product_of_the_paper() -> None:
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    product = x.numpy() * softmax(x.numpy(), axis=-1)
    centred = product - product.mean(-1, keepdims=True)
    expected = centred / (product.var(-1, keepdims=True) + 1e-5) ** 0.5
    torch.testing.assert_close(solu(x), torch.from_numpy(expected))


def test_a_solu_gpt_is_read_and_injected_exactly(cache: Path) -> None:
    solu = replace(GPT, activation="solu")
    make(cache, solu)
    ACT2FN.pop("solu")  # as in a process that has made none
    frozen, model, tokenizer = loaded(cache, solu)
    assert isinstance(model.transformer.h[0].mlp.act, SoLU)
    assert not list(model.transformer.h[0].mlp.act.parameters())
    frozen.self_test(dict(tokenizer(["the film", "very long and dull"], padding=True, return_tensors="pt")))
    assert make(cache, solu).parent != make(cache, GPT).parent
    assert tokenizer.get_vocab() == loaded(cache, GPT)[2].get_vocab()


def test_sequences_are_the_texts_end_to_end_each_read_as_often_as_any_other() -> None:
    tokenizer = byte_pairs(CHAINS, 300, 16)
    end = tokenizer.eos_token_id
    flat = [i for text in CHAINS for i in [*tokenizer(text)["input_ids"], end]]
    rows = replace(GPT, steps=2, batch=3).sequences(CHAINS, tokenizer, end, 16)
    assert rows.shape == (6, 16)
    assert rows.flatten().tolist() == flat[:96]
    assert len(replace(GPT, steps=1000).sequences(CHAINS, tokenizer, end, 16)) == len(flat) // 16
    numbers, recipe = torch.arange(10)[:, None], replace(GPT, steps=6, batch=4)
    read = [batch.flatten() for batch in recipe.batches(numbers, 3, torch.stack)]
    counts = torch.bincount(torch.cat(read), minlength=10)
    assert [len(batch) for batch in read] == [4] * 6
    assert (counts.min(), counts.max()) == (math.floor(24 / 10), math.ceil(24 / 10))


def test_what_is_there_is_not_made_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(cache)
    shorter = embedded_model(0, TEXTS[:100], LABELS[:100], recipe=RECIPE, cache=cache, progress=False)
    assert len({folder.parent, shorter.parent, make(cache, replace(RECIPE, width=8)).parent}) == 3
    monkeypatch.setattr(Recipe, "tokenizer", None)
    assert make(cache, seed=7).parent == folder.parent  # shares the tokenizer
    monkeypatch.setattr(embedded, "train", None)
    assert make(cache) == folder


def test_half_a_model_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Any, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BertForSequenceClassification, "save_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path)
    [family] = (tmp_path / "embedded").iterdir()
    assert not (family / "seed-0").exists()
    (family / ".seed-0.unfinished").mkdir()  # as a killed process leaves it
    (family / ".seed-0.unfinished" / "config.json").write_text("{}")
    load_frozen(make(tmp_path))
    assert sorted(path.name for path in family.iterdir()) == [".lock", "seed-0", "tokenizer"]


def test_ranks_at_once_make_one_model_on_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    threads, train, before = [], embedded.train, torch.get_num_threads()
    monkeypatch.setattr(embedded, "train", lambda *given: [threads.append(torch.get_num_threads()), train(*given)])
    torch.set_num_threads(2)
    try:
        # Threads stand for processes: the lock is on the file, and each asks for it anew.
        with ThreadPoolExecutor(3) as pool:
            (folder,) = set(pool.map(make, [tmp_path] * 3))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert threads == [1]
    load_frozen(folder)


def test_screen_says_what_is_made_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = make(tmp_path, replace(GPT, layers=1, steps=2), seed=4, progress=True)
    out, err = capfd.readouterr()
    assert "seed 4 (gpt2-gelu_new, 1 blocks, 16 wide, 2 batches of 8 x 16 tokens)" in out
    assert str(folder) not in out
    make(tmp_path, seed=2, progress=True)
    more, errors = capfd.readouterr()
    assert "seed 2 (bert, 1 blocks, 16 wide, 1 times over 200 texts)" in more
    noises = ("GPU", "TPU", "num_workers", "LeafSpec", "Writing model shards", "attention_mask", "loss_type", "longer")
    assert not [noise for noise in noises if noise in out + err + more + errors]
    assert not caplog.records


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALIGNERS_CACHE", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "aligners"
    monkeypatch.setenv("ALIGNERS_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    assert cache_folder(tmp_path / "other") == tmp_path / "other"
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"Expected `cache` to be a folder that can be written to.*Not a directory"):
        make(tmp_path / "file")


def test_names() -> None:
    assert embedded_recipe("embedded:1") == (1, Recipe())
    assert embedded_recipe("embedded-gpt:3") == (3, GPTRecipe())
    solu = GPTRecipe(activation="solu", layers=4)
    assert embedded_recipe("embedded-gpt:0:activation=solu,layers=4") == (0, solu)
    assert embedded_recipe("embedded-mlm:1:masked_share=.2") == (1, MaskedRecipe(masked_share=0.2))


@pytest.mark.parametrize(
    ("prefix", "kind"),
    [
        ("embedded", Recipe),
        ("embedded-gpt", GPTRecipe),
        ("embedded-mlm", MaskedRecipe),
        ("embedded-sentences", SentenceRecipe),
    ],
)
def test_every_number_of_a_recipe_can_be_said_in_a_name(prefix: str, kind: type[AnyRecipe]) -> None:
    usual = kind()
    other = {name: "solu" if name == "activation" else value * 2 for name, value in asdict(usual).items()}
    prefix = {Recipe: "embedded", GPTRecipe: "embedded-gpt", MaskedRecipe: "embedded-mlm"}.get(
        kind, "embedded-sentences"
    )
    written = ",".join(f"{name}={value}" for name, value in other.items())
    assert embedded_recipe(f"{prefix}:5:{written}") == (5, kind(**other))


def test_the_recipe_that_earlier_versions_kept_goes_into_the_names() -> None:
    kept = {"recipe": asdict(Recipe(width=32, epochs=2)), "model_x": "embedded:0", "model_y": "embedded:1:width=8"}
    named = recipe_in_names({**kept, "models": ["embedded-gpt:0", "a/b"], "seed": 3})
    assert named == {
        "model_x": "embedded:0:width=32,epochs=2", "model_y": "embedded:1:width=8,epochs=2",
        "models": ["embedded-gpt:0", "a/b"], "seed": 3,
    }  # fmt: skip
    usual = {"recipe": asdict(Recipe()), "models": ["embedded:0"]}
    assert recipe_in_names(usual) == {"models": ["embedded:0"]} == recipe_in_names({"models": ["embedded:0"]})


def test_names_of_which_there_is_no_model_are_refused() -> None:
    for name, says in (
        ("embedded:0:layers=0", "`layers` to be at least 1, but got 0"),
        ("embedded:0:epochs=0", "`epochs` .* at least 1"),
        ("embedded-gpt:0:steps=0", "`steps` .* at least 1"),
        ("embedded:0:width=7", "`width` .* multiple of its `heads`, 2, but got 7"),
        ("embedded-gpt:0:activation=relu", "`activation` to be one of gelu_new, solu, but got 'relu'"),
        ("embedded-gpt:x", r"`embedded-gpt:SEED`.*vocabulary.*activation, each once.*'embedded-gpt:x'"),
        ("embedded-mlm:0:activation=solu", "masked_share, initial, each once"),
    ):
        with pytest.raises(ValueError, match=says):
            embedded_recipe(name)


def test_texts_that_cannot_be_learned_are_refused(tmp_path: Path) -> None:
    given: Any
    for given, recipe, says in (
        (([], []), RECIPE, "`texts`"),
        ((["a", "b"], [0]), RECIPE, "but got 1 for 2"),
        ((["a", "b"], [1, 1]), RECIPE, "two classes"),
        ((["a"], None), GPT, r"at least 16 tokens together.*got"),
    ):
        with pytest.raises(ValueError, match=says):
            embedded_model(0, *given, recipe=recipe, cache=tmp_path)
