"""What all data modules share: their options, the batches of a Trainer, and refusals before anything is made."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from tests.runs import made_again, quiet_trainer
from tests.world import TEST_TEXTS, World

from aligners.datamodules.layers import LayerActivations
from aligners.datamodules.model_texts import ModelTexts, labelled_texts, stitched_texts
from aligners.datamodules.module import stream_of
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.pairings import attention_states, pair_states, pairs_states, universe_states
from aligners.models.recipes import Recipe, embedded_recipe

COMMON = "text batch_size max_length seed dtype attn_implementation trust_remote_code merge_adapters cache workers"
OF_PAIRS = "model_x model_y sites revision_x revision_y special_tokens packed"
OF_STATES = "rows special_tokens component held_out_types packed far_rows"
KEPT = {  # in checkpoints, whatever becomes of the code
    pair_states: f"{OF_PAIRS} {OF_STATES} labels",
    attention_states: f"{OF_PAIRS} share queries far_rows",
    pairs_states: f"models pairs sites revisions {OF_STATES}",
    universe_states: f"models sites revisions {OF_STATES}",
    LayerActivations: "models layers rows special_tokens packed revisions attention component far_rows",
    stitched_texts: "models sites packed masked_share revisions labels component",
    labelled_texts: "models bases revisions labels",
}


@pytest.mark.parametrize("kind", KEPT)
def test_options_are_kept_under_the_names_that_checkpoints_know(kind: Callable[..., Any]) -> None:
    config = kind(seed=3, workers=1, cache=Path("some")).config()
    assert set(config) == {*COMMON.split(), *KEPT[kind].split()}
    assert (config["seed"], config["workers"], config["cache"]) == (3, 1, "some")
    again = made_again(kind, json.loads(json.dumps(config)))
    assert again.config() == config
    assert again.frozen_models.cache == Path("some")
    with pytest.raises(TypeError, match="sed"):
        kind(sed=3)


@pytest.mark.parametrize("kind", [pair_states, LayerActivations, stitched_texts])
def test_batches_move_to_a_gpu_without_waiting_for_it(kind: Callable[..., Any]) -> None:
    moves: list[tuple[torch.device, bool]] = []
    batch = SimpleNamespace(to=lambda device, non_blocking=False: moves.append((device, non_blocking)))
    devices = [torch.device("cuda:1"), torch.device("cpu")]
    for device in devices:
        kind().transfer_batch_to_device(batch, device, 0)
    assert moves == list(zip(devices, (True, False), strict=True))


SHORT = "embedded-gpt:0:max_length=32"
PAIRED = {"rows": "mean", "special_tokens": False, "sites": [1, "2:3"], "dtype": "bfloat16"}
LAYERED = {"rows": "words_mean", "layers": [0, 2], "attention": True}


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (pair_states, PAIRED, {"sites": [[1, 1], [2, 3]], "rows": "mean", "dtype": "bfloat16"}),
        (LayerActivations, LAYERED, {"layers": [[0, 2]] * 2, "rows": "words_mean", "attention": True}),
        (stitched_texts, {"sites": ["1:2"], "masked_share": 0.3}, {"rows": "tokens", "special_tokens": True}),
    ],
)
def test_options_make_an_equal_data_module_whose_batches_are_those_of_a_trainer(
    world: World, kind: Callable[..., Any], options: dict[str, Any], says: dict[str, Any]
) -> None:
    class Keep(pl.LightningModule):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            kept.append(batch)

    kept: list[Any] = []
    names = [world.model_x, world.model_y]
    named = dict(zip(("model_x", "model_y"), names, strict=True)) if kind is pair_states else {"models": names}
    data = kind(**named, text=world.text, batch_size=16, max_length=60, **options)
    quiet_trainer().test(Keep(), datamodule=data, verbose=False)
    again = made_again(kind, json.loads(json.dumps(data.config())))
    for mine, given in zip(again.batches("test"), kept, strict=True):
        assert torch.equal(mine.texts.text, given.texts.text)
        for part in {"x", "y", "text"} & set(dir(given)):
            assert torch.equal(getattr(mine, part), getattr(given, part))
        assert all(map(torch.equal, getattr(mine, "states", []), getattr(given, "states", [])))
    described = json.loads(json.dumps(data.describe()))
    assert {name: described[name] for name in says} == says
    models = described["models"].values() if isinstance(described["models"], dict) else described["models"]
    assert [(model["name"], model["fingerprint"]) for model in models] == [
        (model.name, model.fingerprint) for model in data.frozen
    ]
    assert (described["text"]["n_texts"]["test"], described["text"]["source"]) == (TEST_TEXTS, world.fit)


def test_names_of_embedded_models() -> None:
    expected = Recipe(width=96, layers=6, learning_rate=1e-3)
    assert embedded_recipe("embedded:0:layers=6, width=96,learning_rate=1e-3") == (0, expected)
    for wrong in (":", ":-1", ":a", ":0:", ":0:depth=3", ":0:layers=two", ":0:layers", ":0:layers=2,layers=2",
                  ":0:layers=2=3", ":0:layers=1.5"):  # fmt: skip
        with pytest.raises(ValueError, match=rf"`embedded:SEED:layers=6,width=96`.*width, .*got 'embedded{wrong}'"):
            embedded_recipe(f"embedded{wrong}")


@pytest.mark.parametrize(
    ("kind", "wrong", "says"),
    [
        (pair_states, {"batch_size": 0}, "`batch_size` to be at least 1, but got 0"),
        (pair_states, {"max_length": 1}, "`max_length` to be at least 2, but got 1"),
        (pair_states, {"workers": -1}, "`workers` to be at least 0, but got -1"),
        (pair_states, {"seed": -1}, "`seed` to be at least 0"),
        (pair_states, {"component": "neck"}, "`component` to be one of residual, attention, mlp, but got 'neck'"),
        (pair_states, {"model_x": "embedded:first"}, "`embedded:SEED`.*'embedded:first'"),
        (pair_states, {"store_dtype": "float16"}, "`store_dtype` 'float16' .* but there is no `store`"),
        (pair_states, {"store_dtype": "int8", "store": Path("here")}, "`store_dtype` to be one of float32, .* but"),
        (LayerActivations, {"rows": "sentences"}, r"`rows`.*words_mean.*'sentences'"),
        (LayerActivations, {"models": []}, "`models` to name at least one model, but got none"),
        (labelled_texts, {"models": ["a", "b"], "revisions": ["main"]}, "`revisions` for each of the 2 .* but got 1"),
        (stitched_texts, {"models": ["one"]}, r"`models` to name at least two models, but got \['one'\]"),
        (stitched_texts, {"masked_share": 1.0}, r"`masked_share` to be above 0 and below 1, but got 1\.0"),
        (attention_states, {"share": 0}, "`share` to be above 0 and at most 1, but got 0"),
        (attention_states, {"queries": "some"}, "`queries` to be one of each, mean, but got 'some'"),
        (pair_states, {"sites": "7"}, "`sites` between 0 and L = 4, the blocks of embedded:0.*7"),
        (
            LayerActivations,
            {"models": ["embedded:0:layers=6", "embedded:1"], "layers": [5]},
            "`layers` between 0 and L = 4, the blocks of embedded:1, got 5",
        ),
        (
            stitched_texts,
            {"models": ["embedded-gpt:0", "embedded-gpt:0:activation=solu"], "sites": "9:1"},
            r"`sites` between 0 and L = \d+, the blocks of embedded-gpt:0, got 9",
        ),
        (pair_states, {"packed": True, "rows": "cls"}, "`packed`.*`rows` 'tokens' or 'mean'.*'cls'"),
        (pair_states, {"packed": True, "rows": "words_mean"}, "`packed`.*`rows` 'tokens' or 'mean'.*'words_mean'"),
        (LayerActivations, {"packed": True, "rows": "tokens", "attention": True}, "`attention`.*`packed`"),
        (
            pair_states,
            {"packed": True, "model_x": SHORT, "model_y": SHORT, "max_length": 64},
            "`max_length` of at most 32.*gpt.*64",
        ),
    ],
)
def test_bad_options_are_refused_before_anything_is_made(
    kind: Callable[..., Any], wrong: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says):
        kind(cache=tmp_path, **wrong).prepare_data()
    assert not list(tmp_path.iterdir())


def test_a_run_without_what_is_needed_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected a data module of the kind PairedActivations, but got none"):
        stream_of(SimpleNamespace(datamodule=None), PairedActivations)
    with pytest.raises(ValueError, match=r"of the kind ModelTexts, but got .*PairedActivations"):
        stream_of(SimpleNamespace(datamodule=pair_states()), ModelTexts)
