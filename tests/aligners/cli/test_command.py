from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.demos.boring_classes import BoringDataModule
from lightning.pytorch.loggers import CSVLogger

from aligners.callbacks.checkpoint import SaveAligners
from aligners.callbacks.progress_bar import ProgressBar
from aligners.cli.command import Command, Run, with_named_revisions
from aligners.cli.folders import RANKS_SHARE
from aligners.cli.options import TrainingOptions, check_machine
from aligners.cli.table import train
from aligners.errors import UserError
from aligners.studies.executors import cpu_cores


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RANKS_SHARE, "")


class Data(BoringDataModule):
    def __init__(self, batch_size: int = 7, test_size: int = 1) -> None:
        super().__init__()


def work(run: Run) -> None:
    """Do nothing."""


def boring(*words: str, **more: Any) -> Run:
    """A run of a command that does nothing, with the data above."""
    made = Command(work, "boring", data=Data, defaults={"trainer.max_epochs": 2}, **more)
    parser, words = made.parser(), (*words, "--trainer.accelerator", "cpu")
    return Run(made, parser, parser.parse_args(words), words)


QUIET = ("--trainer.logger", "false", "--trainer.enable_progress_bar", "false")


def test_a_run_has_its_options_its_loggers_and_its_folder() -> None:
    run = boring("--run", "here")
    run.start()
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
    run = boring(*QUIET, "--trainer.devices", "cuda")
    run.start()
    with pytest.raises(ValueError, match="Trainer does not take these options: `devices`"):
        run.trainer()


def test_every_trainer_of_a_run_has_callbacks_of_its_own() -> None:
    run = boring("--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "loss", *QUIET)
    run.start()
    found = [
        [callback for callback in run.trainer().callbacks if isinstance(callback, EarlyStopping)]  # type: ignore[attr-defined]
        for _ in range(2)
    ]
    assert [len(each) for each in found] == [1, 1]
    assert found[0][0] is not found[1][0]
    assert not run.trainer().progress_bar_callback


@pytest.mark.parametrize(("seed", "expected"), [("3", 3), ("true", None), ("false", False)])
def test_a_seed_is_set_before_anything_is_made(seed: str, expected: int | None) -> None:
    run = boring("--seed_everything", seed, options=[TrainingOptions])
    torch.manual_seed(1)
    _ = run.made
    seed_everything = run.options.seed_everything
    assert isinstance(seed_everything, int) if expected is None else seed_everything == expected
    assert torch.initial_seed() == (1 if expected is False else seed_everything)


def test_what_a_command_cannot_do_is_refused_before_it_has_a_folder() -> None:
    def refuse(made: Namespace) -> None:
        raise ValueError(f"no {made.data.__class__.__name__}")

    with pytest.raises(ValueError, match="no Data"):
        boring(*QUIET, "--run", "here", check=refuse).start()
    assert not Path("here").exists()


def test_a_checkpoints_data_options_are_defaults_and_its_batch_size_is_not() -> None:
    config = {"batch_size": 99, "test_size": 5}
    for words, size in (((), 7), (("--data.batch_size", "3"), 3)):
        run = boring(*words)
        run.use_data_of(config)
        assert (run.options.data.batch_size, run.options.data.test_size) == (size, 5)
    assert config == {"batch_size": 99, "test_size": 5}  # as it was


def test_a_checkpoints_revisions_are_part_of_the_names() -> None:
    two = {"model_x": "a/b", "revision_x": "old", "model_y": "c/d", "revision_y": None, "seed": 3}
    assert with_named_revisions(two) == {"model_x": "a/b@old", "model_y": "c/d", "seed": 3}
    many = {"models": ["a/b", "c/d", "e/f"], "revisions": [None, "main", None]}
    assert with_named_revisions(many) == {"models": ["a/b", "c/d@main", "e/f"]}
    assert with_named_revisions({"models": [], "revisions": ["main"]}) == {"models": []}
    assert with_named_revisions({"model": "a/b", "revision": "x"}) == {"model": "a/b@x"}


def test_options_of_a_later_version_are_named() -> None:
    with pytest.raises(ValueError, match=r'data options are unknown: .*"data.telepathy".*Update the package'):
        boring().use_data_of({"telepathy": True})


def test_a_saving_callback_keeps_the_folder_that_the_user_named() -> None:
    free = SaveAligners(at_end=False)
    inside = free.inside(Path("run"))
    assert (free.folder, inside.folder, inside.at_end) == (None, Path("run"), False)
    assert SaveAligners(Path("mine")).inside(Path("run")).folder == Path("mine")


@pytest.mark.parametrize("command", ["fit", "stitch"])
def test_a_file_of_another_kind_is_refused_before_anything_is_made(command: str, tmp_path: Path) -> None:
    torch.save({"state_dict": {"x": torch.ones(3)}, "stitching" if command == "fit" else "alignment": {}}, "other.ckpt")
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    for name, said in (("other", "another kind of run"), ("text", "cannot be read as one"), ("none", "no such file")):
        with pytest.raises(ValueError, match=rf"a last.ckpt of `train.py {command}`, but .*{said}"):
            train([command, "--ckpt_path", f"{name}.ckpt"])
    assert not (tmp_path / "runs").exists()


def test_a_folder_for_checkpoints_is_tried_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"`checkpoint.folder` to be a folder that can be written to"):
        train(["stitch", "--checkpoint.folder", "file/below", "--trainer.logger", "false"])


def test_an_accelerator_that_is_not_there_is_refused_in_plain_words() -> None:
    for name in ("cuda", "mps", "tpu"):
        if AcceleratorRegistry[name]["accelerator"].is_available():
            continue
        with pytest.raises(UserError, match=f"`trainer.accelerator` .* but got '{name}'.*`--trainer.accelerator cpu`"):
            check_machine(Namespace(accelerator=name, devices=1))


def test_more_processes_than_cores_are_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    cores = cpu_cores()
    check_machine(Namespace(accelerator="cpu", devices=cores))
    assert caplog.text == ""
    check_machine(Namespace(accelerator="cpu", devices=str(cores + 6)))
    assert f"{cores + 6} processes (`trainer.devices`) share {cores} CPU cores" in caplog.text
