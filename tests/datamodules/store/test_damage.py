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
from safetensors.torch import load_file

from datamodules.states import States
from datamodules.store import states, stores
from datamodules.store.shards import ShardWriter
from tests.runs import activations
from tests.store_kills import everything
from tests.world import TEST_TEXTS, World


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "SHARD", 4_000)
        yield


def written(world: World, store: Path, **options: Any) -> States:
    data = activations(world, **{"sites": [1, 2], "store": store} | options)
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
    (model,) = (path for path in store.iterdir() if path.name == _name(data, 0))
    manifest = json.loads((model / "manifest.json").read_text())
    assert manifest["about"]["model"] == world.model_x
    assert manifest["about"]["texts"] == TEST_TEXTS == manifest["bounds"][-1]
    assert manifest["identity"]["weights"] == data.frozen[0].fingerprint
    assert manifest["identity"]["stored_as"] == "float32"
    assert set(manifest["sites"]) == {"1", "2"}
    tokens = data.split("test").lengths_of(0)
    held = [load_file(path) for path in sorted((model / "sites" / "02").iterdir())]
    assert len(held) == len(manifest["rows"]) > 2
    assert torch.equal(torch.cat([each["lengths"] for each in held]), tokens.int())
    assert [len(each["rows"]) for each in held] == manifest["rows"]
    for text, rows in enumerate(torch.cat([each["rows"] for each in held]).split(tokens.tolist())):
        inputs = data.split("test")[[text]].inputs_x
        torch.testing.assert_close(rows, data.frozen[0].front(inputs, [2])[0][0], rtol=1e-5, atol=1e-5)


def _name(data: States, place: int) -> str:
    return states.StateIdentity.of(data.frozen[place], data.split("test"), place, "residual", "float32").name


def _flip(place: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[place] ^= 4
        path.write_bytes(content)

    return flip


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (_flip(-3), r"holds other rows of its text number \d+ than were written"),
        (_flip(40), "does not begin as it was written"),
        (lambda path: os.truncate(path, path.stat().st_size - 8), r"has \d+ bytes instead of \d+"),
        (lambda path: os.truncate(path, 20), "does not begin as it was written"),
        (lambda path: shutil.copy(path.parents[1] / "02" / path.name, path), "does not begin as it was written"),
    ],
)
def test_a_damaged_shard_is_named_and_written_again_once_removed(
    world: World, store: Path, harm: Callable[[Path], None], says: str
) -> None:
    before, path = everything(store), shards(store)[1]
    harm(path)
    with pytest.raises(ValueError, match=rf"{path} {says}.*Remove the file"):
        written(world, store)
    path.unlink()
    written(world, store)
    assert everything(store) == before


def _rewritten(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        held = json.loads(path.read_text())
        change(held)
        path.write_text(json.dumps(held))

    return rewrite


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda path: path.write_text(path.read_text()[:-30]), "cannot be read"),
        (lambda path: path.write_text("[]"), "cannot be read"),
        (_rewritten(lambda held: held.pop("bounds")), "cannot be read"),
        (_rewritten(lambda held: held["identity"].update(format=7)), "format is 7: another version of aligners wrote"),
        (_rewritten(lambda held: held["identity"].update(inputs="others")), "it describes the states of"),
    ],
)
def test_a_manifest_that_does_not_belong_there_is_refused(
    world: World, store: Path, harm: Callable[[Path], None], says: str
) -> None:
    path = next(iter(sorted(store.glob("*/manifest.json"))))
    harm(path)
    with pytest.raises(ValueError, match=rf"{path}.*{says}.*Remove the folder {path.parent}"):
        written(world, store)


def test_what_differs_in_anything_has_a_store_of_its_own(world: World, store: Path) -> None:
    before = everything(store)
    for number, options in enumerate(
        ({"max_length": 5}, {"dtype": "float16"}, {"component": "mlp"}, {"store_dtype": "float16"}), start=1
    ):
        written(world, store, **options)
        assert len(list(store.glob("*/manifest.json"))) == 2 + 2 * number
    written(world, store, batch_size=3, rows="mean", attn_implementation="eager", seed=4)
    assert len(list(store.glob("*/manifest.json"))) == 10
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
    with pytest.raises(
        ValueError, match=r"room for 7\d\.\d kB of states of .*x, .*y in `store` .*30 kB free.*bfloat16"
    ):
        written(world, tmp_path / "store")
    assert not list((tmp_path / "store").iterdir())
    monkeypatch.undo()
    capsys.readouterr()
    written(world, tmp_path / "store")
    assert "Writing 7" in capsys.readouterr().out
    written(world, tmp_path / "store")
    assert "Writing" not in capsys.readouterr().out


def _full(real: Callable[..., Any], calls: int, number: int) -> Callable[..., Any]:
    """A function that answers so many times and then finds the disk full."""
    left: Iterator[int] = iter(range(calls))

    def limited(*given: Any) -> Any:
        if next(left, None) is None:
            raise OSError(number, os.strerror(number))
        return real(*given)

    return limited


@pytest.mark.parametrize(
    ("owner", "function", "calls"), [(os, "posix_fallocate", 3), (ShardWriter, "write", 40), (os, "replace", 3)]
)
def test_a_full_disk_stops_under_the_files_name_and_the_rest_is_written_later(
    world: World, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, function: str, calls: int
) -> None:
    expected = everything(store)
    full = _full(getattr(owner, function), calls, errno.ENOSPC)
    monkeypatch.setattr(owner, function, lambda *given: full(*given))
    with pytest.raises(OSError, match="No space left") as raised:
        written(world, tmp_path / "other")
    assert str(tmp_path / "other") in raised.value.filename
    monkeypatch.undo()
    assert not [path for path in everything(tmp_path / "other") if ".unfinished" in path]
    written(world, tmp_path / "other")
    assert everything(tmp_path / "other") == expected


def test_a_folder_that_cannot_be_written_to_is_refused(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"`store`.*file/store"):
        written(world, tmp_path / "file" / "store")


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
