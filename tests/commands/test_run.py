from __future__ import annotations

import os
from pathlib import Path

import pytest
from lightning.pytorch.utilities import rank_zero_only

from commands.run import RANKS_SHARE, new_run_folder


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RANKS_SHARE, "")
    monkeypatch.setattr(rank_zero_only, "rank", 0)


def test_every_run_gets_a_folder_of_its_own() -> None:
    folders = [new_run_folder(None, "fit") for _ in range(3)]
    assert len(set(folders)) == 3
    assert all(folder.is_dir() and folder.name.startswith("fit-") for folder in folders)
    assert all(folder.parent == Path("runs") for folder in folders)


def test_a_named_folder_must_be_empty() -> None:
    assert new_run_folder(Path("mine/deep"), "fit") == Path("mine/deep")
    assert new_run_folder(Path("mine/deep"), "fit").is_dir()
    Path("mine/deep/some.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"`run`.*mine/deep holds files"):
        new_run_folder(Path("mine/deep"), "fit")


def test_further_ranks_share_the_folder_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_run_folder(None, "inject")
    assert os.environ[RANKS_SHARE] == str(folder)
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert new_run_folder(None, "inject") == folder
    assert len(list(Path("runs").iterdir())) == 1
    monkeypatch.setenv(RANKS_SHARE, "")
    new_run_folder(None, "inject")  # a rank that somebody else started makes none
    assert len(list(Path("runs").iterdir())) == 1
