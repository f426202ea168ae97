import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from aligners.cli.table import study
from datamodules.store.keeping import kept_in, remove_down_to
from tests.runs import activations
from tests.store_kills import everything
from tests.world import World


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
    (shard,) = first.rglob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    (cut,) = second.rglob("*.safetensors")
    os.truncate(cut, cut.stat().st_size - 1)
    (third / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="damaged") as raised:
        say(folder, "--verify")
    assert all(str(path) in str(raised.value) for path in (shard, cut, third / "manifest.json"))


def test_bad_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"`folder` to be a folder of stores of states, but there is none at .*nowhere"
    ):
        say(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="`keep` to be at least 0, but got -1"):
        say(tmp_path, "--keep", "-1")
