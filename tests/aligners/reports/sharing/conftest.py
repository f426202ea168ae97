"""A run that keeps maps and has a report, and a hub that is a folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aligners.cli.table import evaluate
from tests.world import World


@pytest.fixture(scope="module")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two closed forms, fitted and measured."""
    folder = tmp_path_factory.mktemp("sharing") / "run"
    given = {
        "data.model_x": world.model_x, "data.model_y": world.model_y, "data.text.source": world.fit,
        "data.text.held_out": world.test, "data.max_length": "60", "data.sites": "1,3", "trainer.accelerator": "cpu",
        "trainer.logger": "false", "closed_form": "[linear,permutation]", "run": str(folder),
    }  # fmt: skip
    evaluate(["inject", *(word for name, value in given.items() for word in (f"--{name}", value))])
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the Hub: what is uploaded lies in a folder of its name, and can be fetched from there."""
    place = tmp_path / "hub"

    class Api:
        def __init__(self, token: str | None = None) -> None:
            self.token = token

        def create_repo(self, repo_id: str, private: bool | None, exist_ok: bool) -> SimpleNamespace:
            (place / repo_id).mkdir(parents=True, exist_ok=exist_ok)
            (place / repo_id / "private").write_text(str(private))
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, repo_id: str, folder_path: Path, **options: Any) -> str:
            shutil.copytree(folder_path, place / repo_id, dirs_exist_ok=True)
            return f"https://huggingface.co/{repo_id}/commit/1"

    def download(repo_id: str, **options: Any) -> str:
        if not (place / repo_id).is_dir():
            raise FileNotFoundError(f"404: no repository {repo_id}\nwith more lines")
        return str(place / repo_id)

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return place
