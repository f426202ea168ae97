import io
import itertools
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from tests.runs import activations, quiet_trainer
from tests.world import World
from torch.utils.data import DataLoader

from aligners.callbacks.progress_bar import ProgressBar
from aligners.cli.log import log_to
from aligners.fitting.alignment import Alignment
from aligners.maps.mlp import MLP
from aligners.progress import Progress, track


def train(world: World, bar: ProgressBar, epochs: int = -1) -> pl.Trainer:
    """For so many epochs, or 16 steps."""
    options = {"max_epochs": epochs, "log_every_n_steps": 1, "enable_progress_bar": True}
    trainer = quiet_trainer(callbacks=[bar], **options)
    module = Alignment({"mlp": partial(MLP, hidden=[8])}, most_steps=16)
    trainer.fit(module, datamodule=activations(world, sites=[1]))
    return trainer


@pytest.mark.parametrize(("epochs", "steps"), [(2, 22), (-1, 16)])
def test_the_bar_is_of_all_epochs_and_ends_with_the_training(
    world: World, epochs: int, steps: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich._console", None)
    shown: list[tuple[float, float]] = []
    end = Progress.end
    monkeypatch.setattr(Progress, "end", lambda bar: [shown.append((bar.done, bar.total)), end(bar)])
    trainer = train(world, ProgressBar(), epochs)
    assert trainer.global_step == steps
    assert shown[-1] == (steps, steps)
    bars = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capfd.readouterr().out)
    assert re.search(rf"Training +━+ +\d+/{steps}\b", bars)


def test_a_log_beside_a_terminal_gets_the_lines(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich._console", None)
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, io.StringIO())
    screen = sys.stdout
    log_to(tmp_path / "new" / "run.log")
    for step in track(range(3), "Reading"):
        print(f"a line at step {step}")
    print("\x1b[1mthe end\x1b[0m")
    print("a warning", file=sys.stderr)
    log = (tmp_path / "new" / "run.log").read_text().splitlines()  # before it is closed: a process may be killed
    assert [line for line in log if line] == [
        "Reading: 3 steps.", *(f"a line at step {step}" for step in range(3)), "the end", "a warning",
    ]  # fmt: skip
    assert "━" in screen.getvalue()  # type: ignore[attr-defined]
    assert "a line at step 1" in screen.getvalue()  # type: ignore[attr-defined]


def test_a_file_gets_lines_and_a_terminal_gets_none(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    now = itertools.count(step=7.0)  # seconds pass from one look at the clock to the next
    monkeypatch.setattr("aligners.progress.time", SimpleNamespace(monotonic=lambda: next(now)))
    trainer = train(world, ProgressBar())
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert "Training: 16 steps." in lines
    (*said,) = [line for line in lines if line.startswith("Training: step")]
    assert [int(line.split()[2]) for line in said] == [5, 10, 15]  # 30 s apart, at the least
    assert re.fullmatch(r"Training: step 10 of 16, loss \d\.\d+, about 0\.7 min left", said[1])
    assert [line.partition(":")[0] for line in lines if line.endswith(" steps.")] == [
        "Reading moments",
        "Solving",
        "Training",
    ]
    trainer.validate(trainer.lightning_module, datamodule=trainer.datamodule, verbose=False)  # type: ignore[attr-defined]
    assert "Retrieval: 1 steps." in capsys.readouterr().out.splitlines()


def test_an_evaluation_is_shown_once_its_batches_begin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Measured(pl.LightningModule):
        def on_test_start(self) -> None:
            print("Something is read first.")

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            pass

    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    trainer = quiet_trainer(callbacks=[ProgressBar()], enable_progress_bar=True)
    trainer.test(Measured(), [DataLoader(range(3)), DataLoader(range(2))], verbose=False)  # type: ignore[arg-type]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith(("first.", "steps."))]
    assert lines == ["Something is read first.", "Evaluating: 5 steps."]
