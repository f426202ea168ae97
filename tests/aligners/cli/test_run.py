from __future__ import annotations

import os
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.demos.boring_classes import BoringDataModule
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only

from aligners.cli.folders import RANKS_SHARE, new_run_folder
from aligners.cli.options import add_data_and_trainer, add_training, command_parser, options_of, parse_with_data
from aligners.cli.run import instantiate, start
from callbacks.checkpoint import SaveAligners
from callbacks.progress import ProgressBar


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


def test_a_run_that_goes_on_keeps_its_folder() -> None:
    Path("mine").mkdir()
    Path("mine/config.yaml").write_text("as it was")
    assert new_run_folder(Path("mine"), "finetune", begun=True) == Path("mine")
    assert os.environ[RANKS_SHARE] == "mine"


class Data(BoringDataModule):
    def __init__(self, batch_size: int = 7, text: dict[str, int] | None = None) -> None:
        super().__init__()


def data_parser() -> ArgumentParser:
    parser = command_parser("boring", "Nothing.")
    add_data_and_trainer(parser, Data, max_epochs=2)
    return parser


def test_a_run_has_its_options_its_loggers_and_its_folder() -> None:
    parser = data_parser()
    run = start("boring", parser, parser.parse_args(["--run", "here", "--trainer.accelerator", "cpu"]))
    assert run.folder == Path("here")
    written = yaml.safe_load(Path("here/config.yaml").read_text())
    assert (written["trainer"]["max_epochs"], written["data"]["batch_size"]) == (2, 7)
    csv, wandb = run.settings["logger"]
    assert isinstance(csv, CSVLogger)
    assert wandb.experiment.config["data"]["batch_size"] == 7
    trainer = run.trainer(max_epochs=5)
    assert (trainer.max_epochs, trainer.default_root_dir) == (5, "here")
    assert any(isinstance(callback, ProgressBar) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    wandb.experiment.finish()


def test_an_option_that_the_trainer_does_not_take_is_said() -> None:
    parser, quiet = data_parser(), ["--trainer.logger", "false", "--trainer.accelerator", "cpu"]
    run = start("boring", parser, parser.parse_args([*quiet, "--trainer.devices", "cuda"]))
    with pytest.raises(ValueError, match="Trainer does not take these options: `devices`"):
        run.trainer()


def test_every_trainer_of_a_run_has_callbacks_of_its_own() -> None:
    parser, quiet = data_parser(), ["--trainer.logger", "false", "--trainer.enable_progress_bar", "false"]
    stopping = ["--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "loss"]
    run = start("boring", parser, parser.parse_args([*stopping, *quiet, "--trainer.accelerator", "cpu"]))
    found = [
        [callback for callback in run.trainer().callbacks if isinstance(callback, EarlyStopping)]  # type: ignore[attr-defined]
        for _ in range(2)
    ]
    assert [len(each) for each in found] == [1, 1]
    assert found[0][0] is not found[1][0]
    assert not run.trainer().progress_bar_callback


@pytest.mark.parametrize(("seed", "expected"), [("3", 3), ("true", None), ("false", False)])
def test_a_seed_is_set_before_anything_is_made(seed: str, expected: int | None) -> None:
    parser = command_parser("boring", "Nothing.")
    add_training(parser, pl.LightningModule, Data, SaveAligners)
    options = parser.parse_args(["--seed_everything", seed])
    torch.manual_seed(1)
    instantiate(parser, options)
    if expected is None:
        assert isinstance(options.seed_everything, int)
    else:
        assert options.seed_everything == expected
    assert torch.initial_seed() == (1 if expected is False else options.seed_everything)


def test_a_checkpoints_data_options_are_defaults_and_its_batch_size_is_not() -> None:
    parser, config = data_parser(), {"batch_size": 99, "text": {"a": 1}}
    assert parse_with_data(parser, [], {"batch_size": 99}).data.batch_size == 7
    del config["text"]
    assert parse_with_data(parser, ["--data.batch_size", "3"], config).data.batch_size == 3
    assert config == {"batch_size": 99}  # as it was


def test_options_of_a_later_version_are_named() -> None:
    with pytest.raises(ValueError, match=r'not all known here: .*"data.telepathy".*Update the package'):
        parse_with_data(data_parser(), [], {"telepathy": True})


def test_options_of_a_function_are_those_of_its_arguments() -> None:
    options = data_parser().parse_args(["--run", "x"])
    assert options_of(lambda run, other=1: None, options) == {"run": Path("x")}


def test_a_saving_callback_keeps_the_folder_that_the_user_named() -> None:
    free = SaveAligners(every_n_epochs=3)
    inside = free.inside(Path("run"))
    assert (free.folder, inside.folder, inside.every_n_epochs) == (None, Path("run"), 3)
    assert SaveAligners(Path("mine")).inside(Path("run")).folder == Path("mine")
