"""What is damaged, foreign or has no room is refused under its name; nothing half-written is taken for whole."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from tests.runs import activations
from tests.store_kills import everything
from tests.world import TEST_TEXTS, World

from aligners.cli.table import study
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.store import stored_states, stores
from aligners.datamodules.store.keeping import kept_in, remove_down_to
from aligners.datamodules.store.shards import ShardWriter
from aligners.files.sealed import read_sealed_json


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_states, "SHARD", 4_000)
        yield


def written(world: World, store: Path, **options: Any) -> PairedActivations:
    data = activations(world, **{"model_y": world.model_x, "sites": [1, 2], "store": store} | options)
    for _ in data.loader("test"):
        pass
    return data


@pytest.fixture(scope="module")
def sound(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(world, tmp_path_factory.mktemp("sound")).stored[0].parent


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "store"))


def shards(store: Path) -> list[Path]:
    return sorted(store.rglob("*.safetensors"))


def test_a_shard_is_a_safetensors_file_and_the_manifest_says_what_it_holds(world: World, store: Path) -> None:
    data = activations(world, sites=[1, 2])
    model = store / _name(data, 0)
    manifest = json.loads((model / "manifest.json").read_text())
    assert manifest["about"]["model"] == world.model_x
    assert manifest["about"]["texts"] == TEST_TEXTS == manifest["bounds"][-1]
    assert manifest["identity"]["weights"] == data.frozen[0].fingerprint
    assert set(manifest["sites"]) == {"1", "2"}
    tokens = data.split("test").lengths_of(0)
    held = [load_file(path) for path in shards(model / "sites" / "02")]
    assert [len(each["rows"]) for each in held] == manifest["rows"]
    assert len(held) > 2
    assert torch.equal(torch.cat([each["lengths"] for each in held]), tokens.int())
    for text, rows in enumerate(torch.cat([each["rows"] for each in held]).split(tokens.tolist())):
        inputs = data.split("test")[[text]].inputs_x
        torch.testing.assert_close(rows, data.frozen[0].front(inputs, [2])[0][0], rtol=1e-5, atol=1e-5)


def _name(data: PairedActivations, place: int) -> str:
    return stored_states.StoredStates(
        Path(), data.frozen[place], data.split("test"), place, "residual", "float32"
    ).source


def unsealed(text: str) -> str:
    return json.dumps(read_sealed_json(text))


def flipped(held: bytes, place: int) -> bytes:
    return held[:place] + bytes([held[place] ^ 4]) + held[place + 1 :]


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda held: flipped(held, len(held) - 3), r"holds other rows of its text number \d+ than were written"),
        (lambda held: flipped(held, 40), "does not begin as it was written"),
        (lambda held: held[:-8], r"has \d+ bytes instead of \d+"),
        (lambda held: held[:20], "does not begin as it was written"),
        (lambda held: held.replace(b'"site": "1"', b'"site": "2"'), "does not begin as it was written"),
    ],
)
def test_a_damaged_shard_is_named_and_written_again_once_removed(
    world: World, store: Path, harm: Callable[[bytes], bytes], says: str
) -> None:
    before, path = everything(store), shards(store)[1]
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"{path} {says}.*Remove the file"):
        written(world, store)
    path.unlink()
    written(world, store)
    assert everything(store) == before


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda text: text[:-30], "cannot be read"),
        (lambda text: "[]", "cannot be read"),
        (lambda text: text.replace("bounds", "bonds"), "cannot be read"),
        (lambda text: text.replace('"format": 1', '"format": 7'), "format is 7: another version of aligners wrote"),
        (lambda text: text.replace('"inputs": "', '"inputs": "f'), "its bytes are not those that were written"),
        (lambda text: unsealed(text).replace('"inputs": "', '"inputs": "f'), "it describes the states of"),
    ],
)
def test_a_manifest_that_does_not_belong_there_is_refused(
    world: World, store: Path, harm: Callable[[str], str], says: str
) -> None:
    path = sorted(store.glob("*/manifest.json"))[0]
    path.write_text(harm(path.read_text()))
    with pytest.raises(ValueError, match=rf"{path}.*{says}.*Remove the folder {path.parent}"):
        written(world, store)


def test_what_differs_in_anything_has_a_store_of_its_own(world: World, store: Path) -> None:
    before = everything(store)
    others: list[dict[str, Any]] = [
        {"max_length": 5},
        {"dtype": "float16"},
        {"component": "mlp"},
        {"store_dtype": "float16"},
        {"attn_implementation": "eager"},
    ]
    for number, options in enumerate(others, start=1):
        written(world, store, **options)
        assert len(list(store.glob("*/manifest.json"))) == 1 + number
    written(world, store, batch_size=3, rows="mean", attn_implementation="sdpa", seed=4)
    assert len(list(store.glob("*/manifest.json"))) == 6
    assert before.items() <= everything(store).items()


def test_sites_that_are_missing_are_added(world: World, tmp_path: Path, store: Path) -> None:
    both = everything(store)
    written(world, tmp_path / "other", sites=[2])
    first = {path: path.stat().st_mtime_ns for path in shards(tmp_path / "other")}
    written(world, tmp_path / "other", batch_size=5)
    assert everything(tmp_path / "other") == both
    assert all(path.stat().st_mtime_ns == when for path, when in first.items())


def test_a_disk_without_the_room_is_refused_before_anything_is_written(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stores, "free_disk", lambda folder: 30_000)
    with pytest.raises(ValueError, match=r"room for 3\d\.\d kB of states of .*x in `store` .*30 kB free.*bfloat16"):
        written(world, tmp_path / "store")
    assert not list((tmp_path / "store").iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"`store`.*file/store"):
        written(world, tmp_path / "file" / "store")
    monkeypatch.undo()
    capsys.readouterr()
    written(world, tmp_path / "store")
    assert "Writing 3" in capsys.readouterr().out
    written(world, tmp_path / "store")
    assert "Writing" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("owner", "function", "calls"), [(os, "posix_fallocate", 3), (ShardWriter, "write", 40), (os, "replace", 3)]
)
def test_a_full_disk_stops_under_the_files_name_and_the_rest_is_written_later(
    world: World, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, function: str, calls: int
) -> None:
    expected, real, left = everything(store), getattr(owner, function), iter(range(calls))

    def full(*given: Any) -> Any:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*given)

    monkeypatch.setattr(owner, function, full)
    with pytest.raises(OSError, match="No space left") as raised:
        written(world, tmp_path / "other")
    assert str(tmp_path / "other") in raised.value.filename
    monkeypatch.undo()
    assert not [path for path in everything(tmp_path / "other") if ".unfinished" in path]
    written(world, tmp_path / "other")
    assert everything(tmp_path / "other") == expected


def test_a_system_that_cannot_set_space_aside_writes_the_same(
    world: World, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")  # as on macOS
    written(world, tmp_path / "other")
    assert everything(tmp_path / "other") == everything(store)


def test_states_that_are_not_finite_or_beyond_float16_are_not_kept(world: World, tmp_path: Path) -> None:
    data = activations(world, sites=[1, 2], store=tmp_path)
    data.frozen[1].blocks[1].output.dense.weight[3, 3] = torch.inf  # type: ignore[union-attr, index]
    with pytest.raises(ValueError, match=r"those of .*y hold NaN or infinity as float32 at site 2, in texts \d+ to"):
        data.loader("test")
    assert not list(tmp_path.glob(f"{_name(data, 1)}/sites/*/*"))
    data = activations(world, sites=[1], store=tmp_path, store_dtype="float16")
    data.frozen[0].blocks[0].output.LayerNorm.bias[0] = 1e5  # type: ignore[union-attr, index]
    with pytest.raises(ValueError, match=r"infinity as float16 at site 1.*float32 as `dtype` and `store_dtype`"):
        data.loader("test")


@pytest.fixture(scope="module")
def three(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three stores: of X, of Y, and of X's sub-layers; the first was used last, the last first."""
    folder = tmp_path_factory.mktemp("three")
    for age, (model, component) in enumerate([("x", "residual"), ("y", "residual"), ("x", "mlp")]):
        name = getattr(world, f"model_{model}")
        data = activations(world, model_x=name, model_y=name, sites=[1], component=component, store=folder)
        data.loader("test")
        for path in (data.stored[0] / "manifest.json", data.stored[0] / "used"):
            os.utime(path, (1e9 - age, 1e9 - age))
    return folder


@pytest.fixture
def folder(three: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three, tmp_path / "stores"))


def say(folder: Path, *words: str) -> None:
    study(["store", "--folder", str(folder), *words])


def test_it_lists_what_is_there(world: World, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say(folder, "--verify")
    lines = capsys.readouterr().out
    names = [kept.folder.name for kept in kept_in(folder)]
    assert [lines.index(name) for name in names] == sorted(lines.index(name) for name in names)
    assert "1 mlp" in lines
    assert "2001-09-09" in lines
    assert "3 stores" in lines
    assert "Everything is as it was written." in lines


def test_the_least_recently_used_go_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    oldest, middle, newest = kept_in(folder)
    assert [kept.manifest.identity.component for kept in (oldest, middle, newest)] == ["mlp", "residual", "residual"]
    assert remove_down_to(folder, oldest.size + middle.size + newest.size) == []
    say(folder, "--keep", str((middle.size + newest.size) / 1e9))
    assert not oldest.folder.exists()
    assert middle.folder.exists()
    assert f"Removed {oldest.folder}" in capsys.readouterr().out
    say(folder, "--remove", f"[{newest.folder.name}]")
    assert [kept.folder for kept in kept_in(folder)] == [middle.folder]
    with pytest.raises(ValueError, match=rf"`remove` out of .*{middle.folder.name}.*got {newest.folder.name}"):
        say(folder, "--remove", f"[{newest.folder.name}]")
    say(folder, "--keep", "0")
    assert kept_in(folder) == []


def test_what_is_being_written_stays(folder: Path) -> None:
    kept, *others = kept_in(folder)
    with FileLock(kept.folder / "locks" / "00000.lock"):
        assert [removed.folder for removed in remove_down_to(folder, 0)] == [other.folder for other in others]
        with pytest.raises(ValueError, match=rf"{kept.folder} is being written"):
            say(folder, "--remove", f"[{kept.folder.name}]")
    assert everything(kept.folder)


def test_every_damage_is_named(folder: Path) -> None:
    first, second, third = (kept.folder for kept in kept_in(folder))
    shard, cut = shards(first)[1], shards(second)[0]
    shard.write_bytes(flipped(shard.read_bytes(), shard.stat().st_size - 1))
    os.truncate(cut, cut.stat().st_size - 1)
    (third / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="damaged") as raised:
        say(folder, "--verify")
    assert all(str(path) in str(raised.value) for path in (shard, cut, third / "manifest.json"))


def test_bad_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`folder` to be a folder of stores of .* there is none at .*nowhere"):
        say(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="`keep` to be at least 0, but got -1"):
        say(tmp_path, "--keep", "-1")
