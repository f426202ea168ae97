"""A model whose states are all in the store is not read."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aligners.models.loading import models
from aligners.models.loading.known import SleepingModel
from aligners.models.loading.models import load_frozen
from aligners.similarity.evaluation import SimilarityEvaluation
from datamodules.layers import LayerActivations
from datamodules.text.sources import TextSource
from tests.runs import activations, quiet_trainer
from tests.world import World


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were read."""
    found, read = [], models.read_weights

    def counted(name: str, *rest: Any) -> Any:
        found.append(name)
        return read(name, *rest)

    monkeypatch.setattr(models, "read_weights", counted)
    return found


def compared(world: World, names: list[str], store: Path, **options: Any) -> SimilarityEvaluation:
    data = LayerActivations(names, text=TextSource(world.fit, held_out=world.test), max_length=60, store=store)
    evaluation = SimilarityEvaluation(["cka"], **options)
    quiet_trainer().test(evaluation, data, verbose=False)
    return evaluation


def test_a_model_is_read_once_to_write_its_states_and_again_only_where_it_runs(
    world: World, tmp_path: Path, loads: list[str]
) -> None:
    pair = [world.model_x, world.model_y]
    first = compared(world, pair, tmp_path)
    assert sorted(loads) == sorted(pair)
    loads.clear()
    second = compared(world, pair, tmp_path)
    assert not loads
    assert (second.rows, second.meta["models"]) == (first.rows, first.meta["models"])
    for _ in range(2):  # at first the fitting texts are missing: both run
        assert len(list(activations(world, sites=[1], store=tmp_path, max_length=60).paired("fit")))
    assert sorted(loads) == sorted(pair)


def test_a_sleeping_model_is_the_model(world: World, tmp_path: Path, loads: list[str]) -> None:
    known = models.KnownModels(tmp_path)
    plain = load_frozen(world.model_x, known=known)
    known.save()
    asleep = load_frozen(world.model_x, known=known)
    assert isinstance(asleep, SleepingModel)
    assert len(loads) == 1
    for name in ("depth", "width", "heads", "task", "n_labels", "label_names", "regression", "causal", "nbytes"):
        assert getattr(asleep, name) == getattr(plain, name)
    assert (asleep.identity(), asleep.dtype, asleep.device) == (plain.identity(), plain.dtype, plain.device)
    assert not asleep.to("cpu").awake
    inputs = {"input_ids": torch.tensor([[2, 5, 6, 3]]), "attention_mask": torch.ones(1, 4, dtype=torch.int64)}
    assert torch.equal(asleep.logits(inputs), plain.logits(inputs))
    assert asleep.awake
    assert len(loads) == 2


def test_weights_that_were_written_again_are_read_again(world: World, tmp_path: Path, loads: list[str]) -> None:
    copy, known = Path(shutil.copytree(world.model_x, tmp_path / "copy")), models.KnownModels(tmp_path / "known")
    before = load_frozen(copy, known=known)
    known.save()
    asleep = load_frozen(copy, known=known)
    weights = load_file(copy / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, copy / "model.safetensors", {"format": "pt"})
    again = load_frozen(copy, known=known)
    assert not isinstance(again, SleepingModel)
    assert again.fingerprint != before.fingerprint
    with pytest.raises(ValueError, match="hold others"):  # it was not read in time
        asleep.self_test({})
    assert len(loads) == 3


def test_what_is_written_down_of_a_model_may_be_damaged(world: World, tmp_path: Path, loads: list[str]) -> None:
    known = models.KnownModels(tmp_path)
    load_frozen(world.model_x, known=known)
    known.save()
    (path,) = (path for path in tmp_path.iterdir() if path.suffix == ".json")
    os.truncate(path, 9)
    load_frozen(world.model_x, known=known)
    assert len(loads) == 2
