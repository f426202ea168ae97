from __future__ import annotations

import re

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from callbacks.progress import ProgressBar
from tests.runs import quiet_trainer


@pytest.mark.parametrize(("limit", "said"), [({"max_epochs": 2}, "Epoch 2 of 2"), ({"max_steps": 3}, "Training")])
def test_the_bar_says_what_ends_the_training(
    limit: dict[str, int], said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    epochs = {"max_epochs": -1} | limit
    trainer = quiet_trainer(callbacks=[ProgressBar()], enable_progress_bar=True, limit_train_batches=2, **epochs)
    trainer.fit(BoringModel())
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capfd.readouterr().out)
    assert said in shown
    assert "-2" not in shown
