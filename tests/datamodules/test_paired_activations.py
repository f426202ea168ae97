"""States paired: of two models, of many pairs at once, and their attention weights."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.runs import activations, quiet_trainer, rank_of
from tests.world import TEST_TEXTS, World, sentences

from aligners.callbacks.best import BestPerSite
from aligners.callbacks.checkpoint import SaveAligners
from aligners.datamodules import frozen_models
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.pairings import attention_states, pairs_states
from aligners.datamodules.text.sources import TextSource
from aligners.fitting.alignment import Alignment
from aligners.fitting.saved_bank import load_bank
from aligners.maps.linear import Linear
from aligners.maps.mlp import MLP
from aligners.models import FrozenModel
from aligners.models.embedded import embedded_model


def test_nothing_is_trained_without_validation_texts_but_evaluations_need_none(world: World) -> None:
    data = activations(world, text=replace(world.text, validation_share=0))
    assert list(data.paired("test"))
    with pytest.raises(ValueError, match=r"`text\.validation_share` is 0\. Set it above 0"):
        data.split("validation")


def test_every_text_comes_once_with_both_models_states(world: World) -> None:
    data = activations(world, sites=["3:1"])
    found = list(data.paired("test"))
    assert sorted(torch.cat([batch.texts.text for batch in found]).tolist()) == list(range(TEST_TEXTS))
    texts = found[0].texts
    direct = [
        model.front(texts.inputs_x, [site])[0][texts.inputs_x["attention_mask"].bool()]
        for model, site in ((data.reader.model_x, 3), (data.reader.model_y, 1))
    ]
    torch.testing.assert_close(found[0].x[0], direct[0])
    torch.testing.assert_close(found[0].y[0], direct[1])
    some = torch.cat([batch.texts.text for batch in data.paired("test", only=7)])
    assert sorted(some.tolist()) == list(range(7))
    second = data.loader("fit", shuffle=True).sampler
    second.set_epoch(1)  # in the order of epoch 0 moments were read
    data.trainer = rank_of(0, 1)
    data.trainer.fit_loop = SimpleNamespace(restarting=False)  # type: ignore[union-attr, assignment]
    assert list(data.train_dataloader().sampler) == list(second)


def test_plain_text_can_be_read_and_trains_embedded_language_models_but_no_classifier(
    world: World, tmp_path: Path
) -> None:
    (tmp_path / "plain.csv").write_text("\n".join(["text", *sentences(60)]))
    plain_text = TextSource(str(tmp_path / "plain.csv"))
    assert next(activations(world, text=plain_text, sites=[1]).paired("test")).texts.labels is None
    with pytest.raises(ValueError, match=r"embedded:0.*needs labels.*`label_column`"):
        _ = activations(world, text=plain_text, model_x="embedded:0").reader
    size = "vocabulary=270,layers=1,width=8,heads=1,steps=4,batch=4,max_length=32"
    models = {"model_x": f"embedded-gpt:0:{size}", "model_y": f"embedded-gpt:0:activation=solu,{size}"}
    packed = {"packed": True, "max_length": 32, "cache": tmp_path}
    batch = next(activations(world, **models, **packed, text=plain_text).paired("test"))
    assert batch.texts.inputs_x["input_ids"].shape[1] == 32
    assert not torch.allclose(batch.x, batch.y)


def test_embedded_models_are_made_from_the_fitting_texts_and_kept(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[list[str], list[int]]] = []

    def watched(seed: int, texts: list[str], labels: list[int], **options: Any) -> Path:
        given.append((texts, labels))
        return embedded_model(seed, texts, labels, **options)

    monkeypatch.setattr(frozen_models, "embedded_model", watched)
    small = "vocabulary=100,epochs=1,max_length=64"  # and one tokenizer
    model_x, model_y = f"embedded:0:layers=1,width=8,{small}", f"embedded:1:layers=2,width=12,{small}"
    options = {"model_x": model_x, "model_y": model_y, "sites": "1:2", "cache": tmp_path}
    data = activations(world, **options)
    data.prepare_data()
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("model.safetensors")}
    assert len(made) == 2
    fit = data.texts.fit
    assert given == [(list(fit["text"]), list(fit["label"]))] * 2
    assert [(model.name, model.depth, model.width, model.n_labels) for model in data.frozen] == [
        (model_x, 1, 8, 2), (model_y, 2, 12, 2),
    ]  # fmt: skip
    again = activations(world, **options)
    assert again.reader.model_y.fingerprint == data.reader.model_y.fingerprint
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("model.safetensors")} == made


# ---------------------------------------------------------------------- many pairs


def many(world: World, **options: Any) -> PairedActivations:
    given = {"models": [world.model_x, world.model_y, world.model_x], "pairs": [[0, 1], [1, 2]], "sites": "1,2:3"}
    return pairs_states(text=world.text, max_length=64, batch_size=16, **{**given, **options})


def fit(data: PairedActivations, folder: Path) -> None:
    maps = {"linear": Linear, "mlp": partial(MLP, hidden=[8])}
    module = Alignment(maps, both_directions=True, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    quiet_trainer(max_epochs=2, callbacks=[BestPerSite(), SaveAligners(folder)]).fit(module, datamodule=data)


def test_a_pair_gets_what_it_would_get_alone(world: World, tmp_path: Path) -> None:
    fit(many(world, held_out_types=0.1), tmp_path)
    alone = {"model_x": world.model_y, "model_y": world.model_x, "sites": "1,2:3", "held_out_types": 0.1}
    fit(activations(world, **alone), tmp_path / "alone")
    folders = tmp_path / "pairs" / "y--x", tmp_path / "alone"
    found, wanted = (load_bank(folder / "aligners.safetensors") for folder in folders)
    assert found.pairs == wanted.pairs
    assert found.seen == wanted.seen
    assert {**found.data_config, "sites": None} == {**wanted.data_config, "sites": None}
    assert found.data == wanted.data
    for route, maps in wanted.maps.items():
        for name, aligner in maps.items():
            state = found.maps[route][name].state_dict()
            torch.testing.assert_close(state, aligner.state_dict(), rtol=1e-3, atol=1e-4)
    steps = [{key: record["best_step"] for key, record in bank.training.items()} for bank in (found, wanted)]
    assert steps[0] == steps[1]


def test_every_model_is_read_once_a_batch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    data = many(world, models=[world.model_x, world.model_y], pairs=[[0, 1], [1, 0]])
    data.setup("fit")
    data.loader("fit")  # what is far from all others is known by now
    calls, front = [], FrozenModel.front

    def counted(model: FrozenModel, *given: Any) -> Any:
        calls.append(model.name)
        return front(model, *given)

    monkeypatch.setattr(FrozenModel, "front", counted)
    batch = next(data.paired("fit"))
    assert sorted(calls) == sorted([world.model_x, world.model_y])
    assert torch.equal(batch.x[:1], batch.y[2:3])  # X's site 1, as X of the first pair and as Y of the second
    assert [place.name for place in data.reader.places()] == ["0-1/1-1", "0-1/2-3", "1-0/1-1", "1-0/2-3"]


def test_pairs_that_are_none_are_refused(world: World) -> None:
    for pairs in ([[0, 0]], [[0, 3]], [[0, 1], [0, 1]], [], [[0, 1, 2]]):
        with pytest.raises(ValueError, match=r"of two different `models` out of 3, and no pair twice"):
            many(world, pairs=pairs)


# ---------------------------------------------------------------------- attention weights


def attention(world: World, **options: Any) -> PairedActivations:
    given = {"sites": "1,2:3", "batch_size": 16, "max_length": 64, **options}
    return attention_states(world.model_x, world.model_y, text=world.text, **given)


def test_rows_are_what_each_head_gives_to_a_pair_of_tokens(world: World, causal: list[str]) -> None:
    data = attention(world, share=1.0, batch_size=4)
    batch = next(data.paired("fit"))
    model_x, model_y = data.frozen
    assert batch.x.shape[::2] == (2, model_x.heads)
    assert batch.y.shape[::2] == (2, model_y.heads)
    place = 0
    for text, mask in enumerate(batch.texts.inputs_x["attention_mask"]):
        alone = {name: values[text : text + 1, mask.bool()] for name, values in batch.texts.inputs_x.items()}
        with torch.no_grad():
            wanted = [model_x.attention(alone)[0][0], model_y.attention(alone)[0][2]]
        count = int(mask.sum()) ** 2
        for found, weights in zip((batch.x[0], batch.y[1]), wanted, strict=True):
            torch.testing.assert_close(found[place : place + count], weights[0].movedim(0, -1).flatten(0, 1))
        place += count
    assert place == batch.x.shape[1]
    batch = next(attention_states(*causal, text=world.text, sites=[1], share=1.0, max_length=60).paired("test"))
    lengths = batch.texts.inputs_x["attention_mask"].sum(1)  # what lies ahead is not looked at
    assert batch.x.shape[1] == int((lengths * (lengths + 1) // 2).sum())


def test_means_over_queries_are_what_a_token_gets_from_those_that_look_at_it(world: World, causal: list[str]) -> None:
    options = {"share": 1.0, "batch_size": 4, "max_length": 60}
    of_pairs, of_tokens = (next(attention(world, queries=each, **options).paired("fit")) for each in ("each", "mean"))
    lengths, place, first = of_pairs.texts.inputs_x["attention_mask"].sum(1).tolist(), 0, 0
    for text, length in enumerate(lengths):
        pairs = of_pairs.x[:, place : place + length**2].unflatten(1, (length, length))  # query, key
        torch.testing.assert_close(of_tokens.x[:, first : first + length], pairs.mean(1))
        assert set(of_tokens.rows.owner[first : first + length].tolist()) == {text}
        place, first = place + length**2, first + length
    assert of_tokens.x.shape[1] == sum(lengths)
    model = attention_states(*causal, text=world.text, sites=[1], queries="mean", share=1.0, max_length=60)
    batch = next(model.paired("test"))
    weights = model.frozen[0].attention(batch.texts.inputs_x)[0][0][0]  # (H, T, T) of the first text
    length = int(batch.texts.inputs_x["attention_mask"][0].sum())
    sums, looking = weights[:, :length, :length].sum(1), torch.arange(length, 0, -1)
    torch.testing.assert_close(batch.x[0, :length], (sums / looking).T)


@pytest.mark.parametrize("queries", ["each", "mean"])
def test_the_rows_that_are_drawn_do_not_depend_on_the_batches(world: World, queries: str) -> None:
    found = []
    for size in (3, 16):
        data = attention(world, share=0.3, batch_size=size, queries=queries)
        rows: dict[int, list[torch.Tensor]] = {}
        for batch in data.paired("test"):
            for text, row in zip(batch.text.tolist(), batch.x[0], strict=True):
                rows.setdefault(text, []).append(row)
        found.append({text: torch.stack(each) for text, each in rows.items()})
    assert found[0].keys() == found[1].keys()
    for text, each in found[0].items():
        torch.testing.assert_close(each, found[1][text])
    every = sum(batch.x.shape[1] for batch in attention(world, share=1.0, queries=queries).paired("test"))
    assert 0.2 < sum(map(len, found[0].values())) / every < 0.4
    with pytest.raises(ValueError, match="Expected `sites` of blocks, from 1 on"):
        attention(world, sites="all").check_models()
