"""The skeleton of a known model says of itself what the model says, whatever its family."""

from __future__ import annotations

from pathlib import Path

import pytest

from aligners.models.loading.known import KnownModels, SleepingModel
from aligners.models.loading.models import load_frozen
from datamodules.store.states import BESIDE
from tests.tiny import ARCHITECTURES, tiny_folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_sleeping_model_of_any_family_has_the_config_of_the_model(tmp_path: Path, architecture: str) -> None:
    folder = tiny_folder(tmp_path / "model", architecture)
    known = KnownModels(tmp_path / "known")
    plain = load_frozen(folder, known=known, tokenizer=False)
    known.save()
    asleep = load_frozen(folder, known=known, tokenizer=False)
    assert isinstance(asleep, SleepingModel)
    configs = [{k: v for k, v in model.config.to_dict().items() if k not in BESIDE} for model in (asleep, plain)]
    assert configs[0] == configs[1]
    assert (asleep.task, asleep.depth, asleep.nbytes) == (plain.task, plain.depth, plain.nbytes)
    assert type(asleep.model) is type(plain.model)
