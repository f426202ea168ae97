from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from aligners.models import FrozenModel
from aligners.models.embedded.recipes import Recipe, embedded_model
from datamodules import frozen_models
from datamodules.pairings import pair_states
from datamodules.rows.reading import PairedBatch
from datamodules.states import States
from datamodules.text.sources import TextSource
from tests.datamodules.tokens.splitters import byte_level, splitter_folder, word_piece
from tests.runs import activations, made_again, quiet_trainer
from tests.tiny import tiny_folder
from tests.world import TEST_TEXTS, World, sentences


def batches(data: States, split: str = "test", **options: int) -> list[PairedBatch]:
    return list(data.paired(split, **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose tokenizer numbers two words the other way round."""
    folder = tiny_folder(tmp_path_factory.mktemp("other"), seed=2)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    words["good"], words["bad"] = words["bad"], words["good"]
    path.write_text(json.dumps(content))
    return str(folder)


@pytest.fixture(scope="module")
def plain_text(tmp_path_factory: pytest.TempPathFactory) -> TextSource:
    path = tmp_path_factory.mktemp("plain") / "plain.csv"
    path.write_text("\n".join(["text", *sentences(60)]))
    return TextSource(str(path))


def test_nothing_is_trained_without_validation_texts_but_evaluations_need_none(world: World) -> None:
    data = activations(world, text=TextSource(world.fit, held_out=world.test, validation_share=0))
    assert len(batches(data)) > 0
    with pytest.raises(ValueError, match=r"`text\.validation_share` is 0\. Set it above 0"):
        data.split("validation")


def test_options_make_an_equal_data_module_again(world: World, tmp_path: Path) -> None:
    data = activations(
        world,
        sites=[1, "2:3"],
        rows="mean",
        special_tokens=False,
        recipe=Recipe(layers=2),
        cache=tmp_path,
        dtype="bfloat16",
        attn_implementation="eager",
        seed=3,
    )
    config = json.loads(json.dumps(data.config()))
    again = made_again(pair_states, config)
    assert again.config() == data.config()
    assert (again.text, again.frozen_models.recipe, again.frozen_models.cache) == (
        data.text,
        Recipe(layers=2),
        tmp_path,
    )
    for a, b in zip(batches(data), batches(again), strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
        assert a.x.dtype == torch.float32


def test_every_text_comes_once_with_both_models_states(world: World) -> None:
    data = activations(world, sites=["3:1"])
    found = batches(data)
    assert sorted(torch.cat([batch.texts.text for batch in found]).tolist()) == list(range(TEST_TEXTS))
    texts = found[0].texts
    direct = [
        model.front(texts.inputs_x, [site])[0][texts.inputs_x["attention_mask"].bool()]
        for model, site in ((data.reader.model_x, 3), (data.reader.model_y, 1))
    ]
    torch.testing.assert_close(found[0].x[0], direct[0])
    torch.testing.assert_close(found[0].y[0], direct[1])
    some = torch.cat([batch.texts.text for batch in batches(data, only=7)])
    assert sorted(some.tolist()) == list(range(7))


def test_iterating_gives_what_a_trainer_gives(world: World) -> None:
    class Keep(pl.LightningModule):
        def test_step(self, batch: PairedBatch, batch_idx: int) -> None:
            kept.append(batch)

    kept: list[PairedBatch] = []
    data = activations(world, sites=[2, "1:3"])
    quiet_trainer().test(Keep(), datamodule=data, verbose=False)
    for mine, given in zip(batches(activations(world, sites=[2, "1:3"])), kept, strict=True):
        assert torch.equal(mine.x, given.x)
        assert torch.equal(mine.y, given.y)
        assert torch.equal(mine.text, given.text)


def test_description_says_which_rows_these_are(world: World) -> None:
    data = activations(world, sites=[0, "2:3"])
    described = json.loads(json.dumps(data.describe()))
    assert described["sites"] == [[0, 0], [2, 3]]
    assert described["rows"] == "tokens"
    assert described["text"]["n_texts"]["test"] == TEST_TEXTS
    assert described["text"]["source"] == world.fit
    models = described["models"]
    assert models["x"]["name"] == world.model_x
    assert models["x"]["fingerprint"] == data.reader.model_x.fingerprint != models["y"]["fingerprint"]


def test_tokenizers_that_differ_pair_texts_but_not_tokens(world: World, other_tokenizer: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)`rows` 'tokens'.*tokenizers.*differ.*'mean' or 'cls'"):
        _ = activations(world, model_y=other_tokenizer).reader
    for rows in ("mean", "cls"):
        data = activations(world, model_y=other_tokenizer, rows=rows, sites=[2])
        texts = next(iter(data.loader("test")))
        assert not torch.equal(texts.inputs_x["input_ids"], texts.inputs[-1]["input_ids"])
        found = data.reader.read(data.reader.prepare(texts))
        assert found.x.shape == found.y.shape == (1, len(texts.text), 16)
        states = data.reader.model_y.front(texts.inputs[-1], [2])[0]
        mask = texts.inputs[-1]["attention_mask"][..., None]
        expected = (states * mask).sum(1) / mask.sum(1) if rows == "mean" else states[:, 0]
        torch.testing.assert_close(found.y[0], expected)


@pytest.mark.parametrize("rows", ["words", "words_first", "words_mean"])
def test_words_pair_rows_of_models_with_tokenizers_that_split_differently(
    world: World, tmp_path: Path, rows: str
) -> None:
    models = [splitter_folder(tmp_path / name, make()) for name, make in (("x", word_piece), ("y", byte_level))]
    options = {"rows": rows, "max_length": 60}
    data = activations(world, model_x=models[0], model_y=models[1], sites=[2, "1:3"], **options)
    both = [activations(world, model_x=name, model_y=name, sites=[2, "1:3"], **options) for name in models]
    data.setup("test")
    assert data.describe()["words"]["test"]["used"] < data.describe()["words"]["test"]["words"]
    # The same words as those of each model alone, among which are some that the other has cut.
    for place, rows_of in enumerate("xy"):
        mine, alone = rows_by_text(batches(data), rows_of), rows_by_text(batches(both[place]), rows_of)
        assert sorted(mine) == sorted(alone) == list(range(TEST_TEXTS))
        for text, found in mine.items():
            torch.testing.assert_close(found, alone[text][:, : found.shape[1]], rtol=1e-5, atol=1e-5)


def rows_by_text(found: list[PairedBatch], which: str) -> dict[int, torch.Tensor]:
    """(S, n, d) of each text."""
    return {int(text): getattr(batch, which)[:, batch.text == text] for batch in found for text in batch.texts.text}


def test_a_model_without_a_head_can_be_read(world: World, tmp_path: Path) -> None:
    data = activations(world, model_x=str(tiny_folder(tmp_path, n_labels=None)), sites=[3])
    assert data.reader.model_x.n_labels is None
    assert all(batch.x.isfinite().all() for batch in batches(data))


def test_plain_text_can_be_read_but_trains_no_embedded_model(world: World, plain_text: TextSource) -> None:
    assert batches(activations(world, text=plain_text, sites=[1]))[0].texts.labels is None
    with pytest.raises(ValueError, match=r"embedded:0.*needs labels.*`label_column`"):
        _ = activations(world, text=plain_text, model_x="embedded:0").reader


def test_embedded_models_are_made_from_the_fitting_texts_and_kept(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[list[str], list[int]]] = []

    def watched(seed: int, texts: list[str], labels: list[int], **options: Any) -> Path:
        given.append((texts, labels))
        return embedded_model(seed, texts, labels, **options)

    monkeypatch.setattr(frozen_models, "embedded_model", watched)
    recipe = Recipe(vocabulary=100, layers=1, width=8, epochs=1, max_length=64)
    options = {"model_x": "embedded:0", "model_y": "embedded:1", "recipe": recipe, "cache": tmp_path}
    data = activations(world, **options)
    data.prepare_data()
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("model.safetensors")}
    assert len(made) == 2
    fit = data.texts.fit
    assert given == [(list(fit["text"]), list(fit["label"]))] * 2
    model: FrozenModel = data.reader.model_x
    assert (model.name, model.depth, model.width, model.n_labels) == ("embedded:0", 1, 8, 2)
    again = activations(world, **options)
    assert again.reader.model_y.fingerprint == data.reader.model_y.fingerprint != model.fingerprint
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("model.safetensors")} == made


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 0}, "`batch_size` to be at least 1, but got 0"),
        ({"max_length": 1}, "`max_length` to be at least 2, but got 1"),
        ({"workers": -1}, "`workers` to be at least 0, but got -1"),
        ({"model_x": "embedded:first"}, "`embedded:SEED`.*'embedded:first'"),
        ({"sites": [1, 9]}, "between 0 and 3, but got 9"),
        ({"rows": "sentences"}, "`rows`.*'sentences'"),
        ({"max_length": 65}, "`max_length` of at most 64.*65"),
    ],
)
def test_bad_options_are_refused(world: World, options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _ = activations(world, **options).reader


def test_a_half_written_model_is_refused(world: World, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=str(tmp_path)):
        _ = activations(world, model_y=str(folder)).reader


def test_padding_on_the_left_gives_the_same_rows(world: World, tmp_path: Path) -> None:
    folders = []
    for seed in (0, 1):
        folder = tiny_folder(tmp_path / str(seed), seed=seed)
        PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left").save_pretrained(folder)
        folders.append(str(folder))
    left = batches(activations(world, model_x=folders[0], model_y=folders[1], sites=[3]))
    right = batches(activations(world, sites=[3]))
    assert left[0].texts.inputs_x["attention_mask"][-1, 0] == 0
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a.x, b.x, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(a.y, b.y, rtol=1e-5, atol=1e-5)


def test_a_wrong_site_is_refused_before_embedded_models_are_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`sites` between 0 and L = 4.*got 7"):
        pair_states(sites="7", cache=tmp_path).prepare_data()
    assert not list(tmp_path.iterdir())
