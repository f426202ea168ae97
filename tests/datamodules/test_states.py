"""States paired: of two models, of many pairs at once, and their attention weights."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from aligners.fitting.alignment import Alignment
from aligners.fitting.bank import StoredBank, load_bank
from aligners.injection.injecting import InjectionEvaluation
from aligners.maps.linear import Linear
from aligners.maps.mlp import MLP
from aligners.models import FrozenModel
from aligners.models.embedded import embedded_model
from aligners.models.recipes import Recipe
from aligners.reports.finished import make_report
from callbacks.best import BestPerSite
from callbacks.checkpoint import SaveAligners
from datamodules import frozen_models
from datamodules.pairings import attention_states, pairs_states
from datamodules.rows.reading import PairedBatch
from datamodules.states import States
from datamodules.text.sources import TextSource
from tests.runs import activations, quiet_trainer
from tests.world import TEST_TEXTS, World, sentences


def batches(data: States, split: str = "test", **options: int) -> list[PairedBatch]:
    return list(data.paired(split, **options))  # type: ignore[arg-type]


def test_nothing_is_trained_without_validation_texts_but_evaluations_need_none(world: World) -> None:
    data = activations(world, text=TextSource(world.fit, held_out=world.test, validation_share=0))
    assert len(batches(data)) > 0
    with pytest.raises(ValueError, match=r"`text\.validation_share` is 0\. Set it above 0"):
        data.split("validation")


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


def test_plain_text_can_be_read_but_trains_no_embedded_model(world: World, tmp_path: Path) -> None:
    (tmp_path / "plain.csv").write_text("\n".join(["text", *sentences(60)]))
    plain_text = TextSource(str(tmp_path / "plain.csv"))
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
    [({"sites": [1, 9]}, "between 0 and 3, but got 9"), ({"max_length": 65}, "`max_length` of at most 64.*65")],
)
def test_bad_options_are_refused(world: World, options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _ = activations(world, **options).reader


# ---------------------------------------------------------------------- many pairs

MAPS = {"linear": Linear, "mlp": partial(MLP, hidden=[8])}


def many(world: World, **options: Any) -> States:
    given = {"models": [world.model_x, world.model_y, world.model_x], "sites": "1,2:3", "batch_size": 16}
    text = TextSource(world.fit, held_out=world.test)
    return pairs_states(text=text, max_length=64, **{**given, "pairs": [[0, 1], [1, 2]], **options})


def fit(data: Any, saving: SaveAligners) -> Alignment:
    module = Alignment(MAPS, both_directions=True, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    quiet_trainer(max_epochs=2, callbacks=[BestPerSite(), saving]).fit(module, datamodule=data)
    return module


@pytest.fixture(scope="module")
def files(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("many")
    fit(many(world, held_out_types=0.1), SaveAligners(folder))
    return [folder / "pairs" / pair / "aligners.ckpt" for pair in ("x--y", "y--x")]


def alone(world: World, folder: Path) -> StoredBank:
    data = activations(world, model_x=world.model_y, model_y=world.model_x, sites="1,2:3", held_out_types=0.1)
    fit(data, SaveAligners(folder))
    return load_bank(folder / "aligners.ckpt")


def test_a_pair_gets_what_it_would_get_alone(world: World, files: list[Path], tmp_path: Path) -> None:
    found, wanted = load_bank(files[1]), alone(world, tmp_path)
    assert found.pairs == wanted.pairs
    assert found.seen == wanted.seen
    assert {**found.data_config, "sites": None} == {**wanted.data_config, "sites": None}
    assert found.data == wanted.data
    for route, maps in wanted.maps.items():
        for name, aligner in maps.items():
            for key, value in aligner.state_dict().items():
                torch.testing.assert_close(found.maps[route][name].state_dict()[key], value, rtol=1e-3, atol=1e-4)
    assert {key: record["best_step"] for key, record in found.training.items()} == {
        key: record["best_step"] for key, record in wanted.training.items()
    }


def test_its_file_is_injected_like_any_other(world: World, files: list[Path]) -> None:
    evaluation = InjectionEvaluation([load_bank(files[0])], ())
    data = activations(world, sites="1,2:3", held_out_types=0.1)
    quiet_trainer().test(evaluation, datamodule=data, verbose=False)
    assert {row["method"] for row in evaluation.rows} >= {"linear", "mlp", "native_y"}


def test_every_model_is_read_once_a_batch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    data = many(world, models=[world.model_x, world.model_y], pairs=[[0, 1], [1, 0]])
    data.setup("fit")
    calls = []
    for model in data.frozen:
        front = model.front
        monkeypatch.setattr(
            model, "front", lambda *given, own=front, name=model.name: calls.append(name) or own(*given)
        )
    batch = next(data.paired("fit"))
    assert sorted(calls) == sorted([world.model_x, world.model_y])
    assert torch.equal(batch.x[:1], batch.y[2:3])  # X's site 1, as X of the first pair and as Y of the second
    assert [place.name for place in data.reader.places()] == ["0-1/1-1", "0-1/2-3", "1-0/1-1", "1-0/2-3"]


@pytest.mark.parametrize("pairs", [[[0, 0]], [[0, 3]], [[0, 1], [0, 1]], [], [[0, 1, 2]]])
def test_pairs_that_are_none_are_refused(world: World, pairs: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"`pairs` to name two different ones of the 3 `models`"):
        many(world, pairs=pairs)


# ---------------------------------------------------------------------- attention weights


def attention(world: World, **options: Any) -> States:
    text = TextSource(world.fit, held_out=world.test)
    given = {"model_x": world.model_x, "model_y": world.model_y, "sites": "1,2:3", "batch_size": 16, "max_length": 64}
    return attention_states(text=text, **{**given, **options})


def test_rows_are_what_each_head_gives_to_a_pair_of_tokens(world: World) -> None:
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


def test_the_rows_that_are_drawn_do_not_depend_on_the_batches(world: World) -> None:
    found = []
    for size in (3, 16):
        data = attention(world, share=0.3, batch_size=size)
        rows: dict[int, list[torch.Tensor]] = {}
        for batch in data.paired("test"):
            for text, row in zip(batch.text.tolist(), batch.x[0], strict=True):
                rows.setdefault(text, []).append(row)
        found.append({text: torch.stack(each) for text, each in rows.items()})
    assert found[0].keys() == found[1].keys()
    for text, each in found[0].items():
        torch.testing.assert_close(each, found[1][text])
    every = sum(batch.x.shape[1] for batch in attention(world, share=1.0).paired("test"))
    assert 0.2 < sum(map(len, found[0].values())) / every < 0.4


def test_maps_are_fitted_and_measured_on_held_out_texts(world: World) -> None:
    data, module = attention(world), Alignment({"linear": Linear})
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    assert [(row["site_x"], row["site_y"]) for row in module.rows] == [(1, 1), (2, 3)]
    assert all(0 < row["fvu"] < 2 and 0 < row["mse"] < 1 and row["mse_fit"] > 0 for row in module.rows)
    assert make_report("attention", module.meta, module.rows).name == "attention"


def test_what_has_no_attention_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match=r"Expected `share` to be above 0 and at most 1, but got 0"):
        attention(world, share=0)
    with pytest.raises(ValueError, match=r"Expected `sites` of blocks, from 1 on"):
        attention(world, sites="all").check_models()
