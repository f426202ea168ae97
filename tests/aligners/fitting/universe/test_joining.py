"""A model that joins a universe later."""

import json
from pathlib import Path

import pytest
import torch

from aligners.cli.table import train
from aligners.fitting.bank import FORWARD, load_bank
from aligners.fitting.universe.universe import load_universe
from tests.tiny import tiny_folder
from tests.world import World, sentences, write_texts

QUICK = ("--trainer.max_epochs", "2", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false",
         "--trainer.accelerator", "cpu")  # fmt: skip


def names(*models: str) -> list[str]:
    return ["--data.models", json.dumps(list(models))]


@pytest.fixture(scope="module")
def models(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [world.model_x, world.model_y, *(str(tiny_folder(folder / f"m{seed}", seed=seed)) for seed in (2, 3))]


@pytest.fixture(scope="module")
def three(world: World, models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three") / "run"
    train([
        "universe", *names(*models[:3]), "--data.text.source", world.fit, "--data.text.held_out", world.test,
        "--data.sites", "1,3", "--data.batch_size", "16", "--data.max_length", "64", "--run", str(folder),
        "--model.network.class_path", "aligners.INN", "--model.network.couplings", "2", "--model.network.hidden", "8",
        *QUICK,
    ])  # fmt: skip
    return folder / "universe.ckpt"


def test_a_fourth_model_joins_and_the_members_stay_as_they_are(
    three: Path, models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(["join", "--universe", str(three), *names(models[3]), "--run", str(tmp_path / "four"), *QUICK])
    before, after = load_universe(three), load_universe(tmp_path / "four" / "universe.ckpt")
    assert [model["name"] for model in after.data["models"]] == models
    then, now = (bank.maps[FORWARD]["universe"] for bank in (before, after))
    assert (then.sites, now.sites) == (6, 8)
    for name, value in then.state_dict().items():
        torch.testing.assert_close(now.state_dict()[name][:6], value, rtol=0, atol=0)
    assert after.moments is not None
    rows = json.loads((tmp_path / "four" / "universe.json").read_text())["rows"]
    assert len(rows) == 4 * 3 * 2
    with_new = [row["fvu"] for row in rows if models[3] in (row["model_x"], row["model_y"])]
    members = [row["fvu"] for row in rows if models[3] not in (row["model_x"], row["model_y"])]
    assert (len(with_new), len(members)) == (12, 12)
    assert sum(with_new) < 1.25 * sum(members)
    pair = load_bank(tmp_path / "four" / "pairs" / "x--m3" / "aligners.ckpt")
    assert pair.data["models"]["y"]["name"] == models[3]
    assert pair.moments is not None


def test_who_cannot_join(three: Path, models: list[str], tmp_path: Path) -> None:
    begin = ["join", "--universe", str(three)]
    with pytest.raises(ValueError, match="is in it already"):
        train([*begin, *names(models[0])])
    with pytest.raises(ValueError, match="the one model that joins, but got"):
        train([*begin, *names(*models[2:])])
    with pytest.raises(ValueError, match="Expected `universe` to name a file"):
        train(["join", *names(models[3])])
    wide = str(tiny_folder(tmp_path / "wide", width=8))
    with pytest.raises(ValueError, match="`models` of one width"):
        train([*begin, *names(wide), "--run", str(tmp_path / "a"), *QUICK])
    other = write_texts(tmp_path / "other.csv", sentences(60))
    with pytest.raises(ValueError, match="was fitted on other texts than"):
        train([*begin, *names(models[3]), "--data.text.source", other, "--run", str(tmp_path / "b"), *QUICK])
