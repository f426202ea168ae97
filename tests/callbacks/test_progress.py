import itertools
import re
from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest

from aligners.fitting.alignment import Alignment
from aligners.maps.mlp import MLP
from callbacks.progress import ProgressBar
from tests.runs import activations, quiet_trainer
from tests.world import World


def train(world: World, bar: ProgressBar, epochs: int = -1) -> pl.Trainer:
    """For so many epochs, or 16 steps."""
    options = {"max_epochs": epochs, "log_every_n_steps": 1, "enable_progress_bar": True}
    trainer = quiet_trainer(callbacks=[bar], **options)
    module = Alignment({"mlp": partial(MLP, hidden=[8])}, most_steps=16)
    trainer.fit(module, datamodule=activations(world, sites=[1]))
    return trainer


@pytest.mark.parametrize(("epochs", "steps", "said"), [(2, 22, "Epoch 2 of 2"), (-1, 16, "Training")])
def test_the_bar_says_what_ends_the_training_and_ends_there(
    world: World, epochs: int, steps: int, said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    totals: list[float] = []

    class Bar(ProgressBar):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            super().on_train_epoch_start(trainer, pl_module)
            totals.append(self.total_train_batches)

    trainer = train(world, Bar(), epochs)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capfd.readouterr().out)
    assert said in shown
    assert "-2" not in shown
    assert trainer.global_step == steps
    assert totals == [trainer.num_training_batches, steps - trainer.num_training_batches]


def test_a_file_gets_lines_and_a_terminal_gets_none(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    now = itertools.count(step=7.0)  # seconds pass from one look at the clock to the next
    monkeypatch.setattr("aligners.progress.time", SimpleNamespace(monotonic=lambda: next(now)))
    train(world, ProgressBar())
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert "Training: 16 steps." in lines
    (*said,) = [line for line in lines if line.startswith("Training: step")]
    assert [int(line.split()[2]) for line in said] == [5, 10, 15]  # 30 s apart, at the least
    assert re.fullmatch(r"Training: step 10 of 16, loss \d\.\d+, about 0\.7 min left", said[1])
    assert any(line.startswith("Reading moments: ") for line in lines)
