import hashlib
import threading
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from tests.runs import activations, made_again, rank_of
from tests.world import World

from aligners.datamodules import frozen_models
from aligners.datamodules.frozen_models import FrozenModels
from aligners.datamodules.pairings import pair_states
from aligners.models import FrozenModel


def places(devices: Any, maps: Any) -> list[Any]:
    named = [("x", None), ("y", None), ("x", None)]
    return FrozenModels(named, None, NotImplemented, 8, devices=devices, device_map=maps).places


@pytest.mark.parametrize(
    ("devices", "maps", "message"),
    [
        (["cpu"], None, "`devices` to have one entry for each of 3 models, but got 1"),
        (None, ["auto"] * 4, "`device_map` to have one entry for each of 3 models, but got 4"),
        (["cpu", None, "cpu"], ["auto", None, None], "model 1 has both: cpu and auto"),
        (["cpu", "cpu", "cpu:0"], None, "models 1 and 3 are the same"),
        (None, [None, "auto", "auto"], "models 1 and 3 are the same"),
    ],
)
def test_each_model_has_one_place(devices: Any, maps: Any, message: str) -> None:
    assert places(None, None) == [(None, None)] * 3
    assert places(["cpu", None, "cpu"], [None, "auto", None]) == [("cpu", None), (None, "auto"), ("cpu", None)]
    with pytest.raises(ValueError, match=message):
        places(devices, maps)


def test_devices_that_are_not_there_are_refused_at_once(world: World) -> None:
    for name in ("gpu", "cuda:99", "meta"):
        with pytest.raises(ValueError, match=f"Expected `devices` .*{name}"):
            activations(world, devices=["cpu", name])


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Which models are moved, and where to."""
    found: list[tuple[str, Any]] = []

    def to(model: FrozenModel, device: Any) -> FrozenModel:
        found.append((model.name, device))
        return model

    monkeypatch.setattr(FrozenModel, "to", to)
    return found


def test_models_are_where_they_are_told_to_be(world: World, moves: list[tuple[str, Any]]) -> None:
    for options, expected in (
        ({"devices": ["cpu:0", None]}, [(world.model_x, "cpu:0"), (world.model_y, "cpu")]),
        ({"device_map": [None, {"": "cpu"}]}, [(world.model_x, "cpu")]),
    ):
        data = activations(world, **options)
        _ = data.frozen
        moves.clear()
        data.setup("test")
        assert moves == expected


def test_models_that_are_not_needed_make_room_first(world: World, moves: list[tuple[str, Any]]) -> None:
    models = activations(world).frozen_models
    _ = models.loaded
    moves.clear()
    models.place("cuda:7", [0])
    assert moves == [(world.model_y, "cpu"), (world.model_x, "cuda:7")]


def test_a_sharded_model_is_read_like_a_whole_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = next(activations(world).paired("test"))
    load = frozen_models.load_frozen

    def sharded(name: str, **options: Any) -> FrozenModel:
        frozen = load(name, **{**options, "device_map": None})
        if options["device_map"] is not None:  # one device only would need no hooks: have them all the same
            parts = {"bert.embeddings": "cpu", "bert.encoder": "cpu", "bert.pooler": "cpu", "classifier": "cpu"}
            dispatch_model(frozen.model, parts, force_hooks=True)
            frozen.sharded = True
        return frozen

    monkeypatch.setattr(frozen_models, "load_frozen", sharded)
    data = activations(world, device_map=[None, "auto"])
    found = next(data.paired("test"))
    assert [model.sharded for model in data.frozen] == [False, True]
    assert torch.equal(found.x, expected.x)
    assert torch.equal(found.y, expected.y)


def test_several_ranks_do_not_share_devices(world: World) -> None:
    data = activations(world, devices=["cpu", "cpu"])
    data.trainer = rank_of(0, 2)
    with pytest.raises(ValueError, match=r"one process where `devices` or `device_map` .*but got 2.*`trainer.devices`"):
        data.setup("fit")


def test_places_are_no_part_of_the_options_that_a_checkpoint_keeps(world: World) -> None:
    data = activations(world, devices=["cpu", None], device_map=[None, "auto"])
    config = data.config()
    assert not {"devices", "device_map"} & config.keys()
    assert made_again(pair_states, config).frozen_models.places == [(None, None)] * 2


def plain_fingerprint(model: FrozenModel) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in sorted(model.model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(weight.contiguous().numpy().tobytes())
    return digest.hexdigest()


def test_weights_are_hashed_while_the_next_model_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = threading.Event()
    read = frozen_models.load_frozen
    fingerprint: Any = FrozenModel.fingerprint
    hashes = fingerprint.func
    asked_in = []

    def hash_of(model: FrozenModel) -> str:
        asked_in.append(threading.current_thread())
        found: str = hashes(model)
        hashed.set()
        return found

    def read_slowly(path: str, **options: Any) -> FrozenModel:
        if path == world.model_y:
            assert hashed.wait(60), "the weights of the first model were not hashed meanwhile"
        return read(path, **options)

    monkeypatch.setattr(fingerprint, "func", hash_of)
    monkeypatch.setattr(frozen_models, "load_frozen", read_slowly)
    models = activations(world).frozen_models.loaded
    assert [model.fingerprint for model in models] == [plain_fingerprint(model) for model in models]
    assert len(asked_in) == 2  # and no more when they are asked for
    assert threading.main_thread() not in asked_in


def test_a_model_that_cannot_be_read_is_named_while_another_is_hashed(world: World) -> None:
    models = activations(world, model_y="no/such/model").frozen_models
    with pytest.raises(ValueError, match="no/such/model"):
        _ = models.loaded
