from __future__ import annotations

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
from callbacks.best import BestPerSite
from callbacks.checkpoint import SaveAligners
from datamodules.pairings import pairs_states
from datamodules.states import States
from datamodules.text.sources import TextSource
from tests.runs import activations, quiet_trainer
from tests.world import World

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


def alone(world: World, folder: Path, turned: bool) -> StoredBank:
    models = (world.model_y, world.model_x) if turned else (world.model_x, world.model_y)
    data = activations(world, model_x=models[0], model_y=models[1], sites="1,2:3", held_out_types=0.1)
    fit(data, SaveAligners(folder))
    return load_bank(folder / "aligners.ckpt")


@pytest.mark.parametrize("turned", [False, True])
def test_a_pair_gets_what_it_would_get_alone(world: World, files: list[Path], tmp_path: Path, turned: bool) -> None:
    found, wanted = load_bank(files[turned]), alone(world, tmp_path, turned)
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
