import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from tests.processes import ROOT, Started
from tests.shell import TWO_RANKS, options
from tests.world import World

from aligners.cli import endings, table
from aligners.cli.command import Command, Run
from aligners.cli.train import fit
from aligners.datamodules import frozen_models, module
from aligners.errors import UserError

Fails = Callable[..., int]


table.known_options("train", "fit")  # of the command itself, before a test puts another in its place


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Run `train.py fit`, which raises; the status with which the process would end."""

    def run(error: BaseException, *words: str) -> int:
        def fail(run: Run) -> None:
            raise error

        monkeypatch.setattr(fit, "fit", Command(fail))
        monkeypatch.setattr("sys.argv", ["train.py", "fit", *words])
        with pytest.raises(SystemExit) as done:
            table.train()
        return int(done.value.code or 0)

    return run


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UserError("Expected `this`, but got that."), "error: Expected `this`, but got that.\n"),
        (MisconfigurationException("No such device."), "error: No such device.\n"),
        (PermissionError(13, "Permission denied", "/x"), "error: Cannot read or write /x: Permission denied.\n"),
        (OSError(28, "No space left on device"), "error: Cannot read or write: No space left on device.\n"),
    ],
)
def test_what_the_user_can_mend_is_one_message(
    error: Exception, said: str, fails: Fails, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails(error) == 2
    assert capsys.readouterr().err == said
    with pytest.raises(type(error)):
        fails(error, "--traceback")


@pytest.mark.parametrize(
    "error", [KeyError("x"), RuntimeError("x"), TypeError("x"), OSError("no number"), ValueError("as by int('x')")]
)
def test_our_own_faults_keep_their_traceback(error: Exception, fails: Fails) -> None:
    with pytest.raises(type(error)):
        fails(error)


def test_a_full_disk_ends_with_the_command_that_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "fit", "--run", "here"])
    for error, further in (
        (
            OSError(28, "No space left on device", "/x/last.ckpt"),
            "To resume, run\n  .* --run there --ckpt_path l.ckpt\n",
        ),
        (PermissionError(13, "Permission denied", "/x"), ""),
        (UserError("Expected `this`."), ""),
    ):
        with pytest.raises(SystemExit) as ended, endings.early_endings(), \
             endings.goes_on_with(lambda: {"run": "there", "ckpt_path": "l.ckpt"}):  # fmt: skip
            raise error
        assert ended.value.code == 2
        assert re.fullmatch(f"error: .*\\.\n{further}", capsys.readouterr().err)


def test_a_signal_ends_with_a_line_and_its_status(fails: Fails, capsys: pytest.CaptureFixture[str]) -> None:
    assert (fails(KeyboardInterrupt()), fails(SIGTERMException())) == (130, 143)
    nothing = "There is nothing to resume.\n"
    assert capsys.readouterr().err == f"Stopped by Ctrl-C.\n{nothing}Stopped by SIGTERM.\n{nothing}"


def test_an_exit_that_hangs_is_cut_off() -> None:
    script = (
        "import atexit, time; from aligners.cli import endings; endings.LONGEST_EXIT = 0.2\n"
        "atexit.register(lambda: (time.sleep(300), print('late')))\n"
        "with endings.early_endings(): raise KeyboardInterrupt"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (130, "")


def test_a_further_rank_is_silent_where_the_first_has_ended(
    fails: Fails, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("aligners.cli.endings.PATIENCE", 0.2)
    assert fails(UserError("Mine alone.")) == 2
    assert capsys.readouterr().err == "On rank 1: error: Mine alone.\n"
    parents = iter([1, *[2] * 9])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    assert fails(UserError("As the first.")) == 2
    assert capsys.readouterr().err == ""


MISSPELT = '{"linear": {"class_path": "Linear", "init_args": {"rigde": 1}}}'
WRONG = [
    ("train fit", ["--data.site", "all"], "--data.site"),
    ("train fit", ["--data.rows", "sentences"], "rows"),
    ("train fit", ["--model.aligners", '{"linear": "Nonlinear"}'], "aligners"),
    ("train fit", ["--model.aligners", MISSPELT], "aligners"),
    ("train fit", ["--data.model_x", "embedded:0:width=96"], "equal widths"),
    ("train fit", ["--trainer.max_epochs", "0"], "`trainer.max_epochs` to be at least 1, but got 0"),
    ("train fit", ["--seed_everything", "4294967296"], "`seed_everything` to be at least 0 and at most 4294967295"),
    ("train finetune", ["--trainer.limit_train_batches", "0"], "`trainer.limit_train_batches` to be at least 1"),
    ("train stitch", ["--data.models", '["only"]'], "models"),
    ("train stitch", ["--model.routes", "backward"], "routes"),
    ("train stitch", ["--model.loss.task", "-1"], "loss"),
    ("train stitch", ["--trainer.max_steps", "0"], "`trainer.max_steps` to be at least 1, but got 0"),
    ("train validate", ["--model.warmup", "2"], "`warmup` to be at least 0 and below 1"),
    ("train fit", ["--data.batch_size", "ten"], "`--data.batch_size` to be a whole number, but got 'ten'"),
    ("train fit", ["--model.aligners", "linaer"], "Did you mean Linear?"),
    ("train fit", ["--config", "demmo"], "Did you mean demo?"),
    ("train fit", ["--imports", "none.py"], "`imports` to name Python files or modules, but there is no file none.py"),
    ("evaluate inject", ["--closed_form", "nonsense"], "`closed_form` out of linear"),
    ("evaluate inject", ["--checkpoints", "nothing.ckpt", "more"], "at nothing.ckpt, but there is no such file"),
    ("evaluate inject", ["--closed_form", "[]"], "`checkpoints` or `closed_form` to name at least one map"),
    ("evaluate inject", ["--checkpoints+", "nothing.ckpt"], "at nothing.ckpt, but there is no such file"),
    ("evaluate stitch", ["--checkpoint", "nothing.ckpt"], "no such file"),
    ("evaluate similarity", ["--measures", "[nonsense]"], "measures"),
    ("evaluate similarity", ["--groups", "1"], "groups"),
    ("evaluate surgery", ["--learning_rate", "-1"], "`learning_rate` to be above 0"),
]


@pytest.mark.parametrize(
    ("command", "words", "said"), WRONG, ids=[f"{command} {' '.join(w)}" for command, w, _ in WRONG]
)
def test_a_wrong_option_is_one_message_before_anything_is_loaded(
    command: str, words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def touched(*_: Any, **__: Any) -> None:
        raise AssertionError("something was loaded")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "load_texts", touched)
    for name in ("load_frozen", "embedded_model"):
        monkeypatch.setattr(frozen_models, name, touched)
    script, name = command.split()
    monkeypatch.setattr("sys.argv", [f"{script}.py", name, *words])
    with pytest.raises(SystemExit) as done:
        getattr(table, script)()
    assert done.value.code == 2
    shown = capsys.readouterr().err
    assert len([line for line in shown.splitlines() if line.startswith("error: ")]) == 1
    assert said in shown
    assert "Traceback" not in shown
    assert list(tmp_path.iterdir()) == []


def fit_options(world: World, **more: Any) -> list[str]:
    return ["fit", *options(
        data__model_x=world.model_x, data__model_y=world.model_y, data__text__source=world.fit,
        data__text__held_out=world.test, data__max_length=64, trainer__accelerator="cpu", trainer__logger=False, **more,
    )]  # fmt: skip


# Another rank than the first, without its imports: what it prints later must not be seen.
RANKS = """
import fcntl, os, pathlib, time
if "LOCAL_RANK" in os.environ:
    with open("alive", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        pathlib.Path("begun").touch()
        time.sleep(60)
        print("late")
else:
    from aligners.cli.table import train
    train()
"""


@contextmanager
def failing_beside_another_rank() -> Iterator[None]:
    def fail(*_: Any, **__: Any) -> None:
        while not Path("begun").exists():
            time.sleep(0.01)
        raise UserError("Mine.")

    with patch.object(pl.Trainer, "_run", fail):
        yield


@pytest.mark.slow
def test_the_ranks_that_lightning_has_started_end_with_the_first(world: World, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    words = [*fit_options(world), *TWO_RANKS]
    done = Started(tmp_path, str(tmp_path / "ranks.py"), *words, around=failing_beside_another_rank)
    assert done.end() == 2, done.said()
    with (tmp_path / "alive").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # whoever had it has ended
    assert done.printed()[1].count("error: Mine.\n") == 1
    assert not {"Traceback", "late"} & set(done.said().split())


@pytest.mark.slow
def test_ctrl_c_prints_the_command_that_resumes_a_fit(world: World, tmp_path: Path) -> None:
    words = [*fit_options(world, trainer__max_epochs=100000), "--model.aligners={mlp: MLP}"]
    words.append("--checkpoint.every_n_minutes=1e-9")
    running = Started(tmp_path, "train", *words, "--run", "my run")
    running.wait_until((tmp_path / "my run" / "last.ckpt").is_file)
    running.signal(signal.SIGINT)
    assert running.end() == 130
    out, err = running.printed()
    said = "Stopped by Ctrl-C.\nTo resume, run\n  "
    assert said in err
    assert "Traceback" not in err
    assert "Saved my run/last.ckpt" in out
    program, script, *typed = shlex.split(err.partition(said)[2])
    assert Path(shutil.which(program) or "").parent == Path(sys.executable).parent
    assert script == str(ROOT / "train.py")
    assert typed == [*words, "--run", "my run-2", "--ckpt_path", "my run/last.ckpt"]
    steps = torch.load(tmp_path / "my run" / "last.ckpt", weights_only=True)["global_step"]
    ended = Started(tmp_path, "train", *typed, "--trainer.max_time=00:00:00:01")
    assert ended.end() == 0, ended.said()
    assert torch.load(tmp_path / "my run-2" / "last.ckpt", weights_only=True)["global_step"] > steps
