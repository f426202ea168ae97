from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForSequenceClassification

from aligners.models.embedded import recipes
from aligners.models.embedded.kinds import word_pieces
from aligners.models.embedded.recipes import Recipe, cache_folder, embedded_model, embedded_recipe

RECIPE = Recipe(vocabulary=200, layers=1, width=16, max_length=24, epochs=1, batch=20)


def corpus() -> tuple[list[str], list[int]]:
    draw = np.random.default_rng(0)
    words = {0: ["dull", "flat", "stale"], 1: ["bright", "moving", "fresh"]}
    labels = [i % 2 for i in range(200)]
    texts = [
        " ".join(["the", "film", "is", *draw.choice(words[label], size=1 + i % 9)]) for i, label in enumerate(labels)
    ]
    return texts, labels


TEXTS, LABELS = corpus()


def make(cache: Path, seed: int = 0, recipe: Recipe = RECIPE) -> Path:
    return embedded_model(seed, TEXTS, LABELS, recipe=recipe, cache=cache, progress=False)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_folder_holds_an_ordinary_model(cache: Path) -> None:
    folder = make(cache)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) < 10_000
    assert (model.config.num_labels, model.config.num_hidden_layers, model.config.hidden_size) == (2, 1, 16)
    assert tokenizer.model_max_length == 24
    assert len(tokenizer) == model.config.vocab_size <= 200
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("The film is BRIGHT")["input_ids"])
    assert pieces == ["[CLS]", "the", "film", "is", "bright", "[SEP]"]
    assert tokenizer("film [MASK]")["input_ids"][2] == tokenizer.mask_token_id


def test_training_learns_the_task(tmp_path: Path) -> None:
    folder = make(tmp_path, recipe=Recipe(vocabulary=200, layers=1, width=16, epochs=8, batch=20, learning_rate=5e-3))
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    inputs = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        right = model(**inputs).logits.argmax(-1) == torch.tensor(LABELS)
    assert right.float().mean() > 0.95


def test_same_seed_gives_the_same_weights_and_another_seed_others(cache: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    torch.rand(3)
    one, again = (load_file(make(where) / "model.safetensors") for where in (cache, tmp_path))
    other = load_file(make(cache, seed=1) / "model.safetensors")
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["classifier.weight"], other["classifier.weight"])


def test_tokenizer_follows_from_the_texts() -> None:
    # The library's own trainer answers differently from call to call: its hash tables are seeded anew.
    made = [word_pieces(TEXTS, 200, 24).get_vocab() for _ in range(5)]
    assert all(vocabulary == made[0] for vocabulary in made)


def test_global_state_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    make(tmp_path)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()


def test_what_is_there_is_not_made_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(cache)
    monkeypatch.setattr(Recipe, "tokenizer", None)
    another = make(cache, seed=7)  # shares the tokenizer
    assert another.parent == folder.parent
    monkeypatch.setattr(recipes, "train", None)
    assert make(cache) == folder


def test_recipe_and_texts_name_the_folder(cache: Path) -> None:
    shorter = embedded_model(0, TEXTS[:100], LABELS[:100], recipe=RECIPE, cache=cache, progress=False)
    smaller = make(cache, recipe=Recipe(vocabulary=200, layers=1, width=8, max_length=24, epochs=1, batch=20))
    assert len({make(cache).parent, shorter.parent, smaller.parent}) == 3


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
    AutoModelForSequenceClassification.from_pretrained(make(tmp_path))
    assert sorted(path.name for path in family.iterdir()) == [".lock", "seed-0", "tokenizer"]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_at_once_make_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    for name, value in {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, str(value))
    trained, train = [], recipes.train

    def counted(*given: Any) -> Any:
        trained.append(given)
        return train(*given)

    monkeypatch.setattr(recipes, "train", counted)
    # Threads stand for processes: the lock is on the file, and each asks for it anew.
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(make, [tmp_path] * 3))
    assert len(set(folders)) == len(trained) == 1
    AutoModelForSequenceClassification.from_pretrained(folders[0])


def test_training_runs_on_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, train = [], recipes.train

    def counted(*given: Any) -> Any:
        threads.append(torch.get_num_threads())
        return train(*given)

    monkeypatch.setattr(recipes, "train", counted)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        make(tmp_path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert threads == [1]


def test_screen_says_what_is_made_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = embedded_model(2, TEXTS, LABELS, recipe=RECIPE, cache=tmp_path)
    out, err = capfd.readouterr()
    assert "Training the embedded model of seed 2" in out
    assert str(folder) in out
    for noise in ("GPU", "TPU", "num_workers", "LeafSpec", "Writing model shards"):
        assert noise not in out + err
    assert not caplog.records


def test_a_cache_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"Expected `cache` to be a folder that can be written to.*Not a directory"):
        make(tmp_path / "file")


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALIGNERS_CACHE", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "aligners"
    monkeypatch.setenv("ALIGNERS_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    assert cache_folder(tmp_path / "other") == tmp_path / "other"


@pytest.mark.parametrize(
    ("texts", "labels", "says"),
    [([], [], "`texts`"), (["a", "b"], [0], "2 texts and 1 labels"), (["a", "b"], [1, 1], "two classes")],
)
def test_bad_input_is_refused(tmp_path: Path, texts: list[str], labels: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        embedded_model(0, texts, labels, cache=tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("embedded:0:layers=0", "`layers` to be at least 1, but got 0"),
        ("embedded:0:epochs=0", "`epochs` .* at least 1"),
        ("embedded-gpt:0:steps=0", "`steps` .* at least 1"),
        ("embedded:0:width=7", "`width` .* multiple of its `heads`, 2, but got 7"),
    ],
)
def test_sizes_of_which_there_is_no_model_are_refused(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        embedded_recipe(name, RECIPE)
