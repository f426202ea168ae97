"""A fine-tuning that is interrupted ends as it would have: the same weights and figures, to the bit."""

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from tests.interrupting import strike
from tests.runs import quiet_trainer, state
from tests.world import World

from aligners.callbacks.checkpoint import SaveFinetuning
from aligners.datamodules.model_texts import ModelTexts, labelled_texts
from aligners.datamodules.text.sources import TextSource
from aligners.files.sealed import read_sealed_json
from aligners.finetuning.classifier_training import FINETUNING, Finetuning, FinetuningRecipe
from aligners.finetuning.jobs import FINISHED, LAST, Job, Variant, train

BATCHES, EPOCHS = 11, 2
FAST = FinetuningRecipe(learning_rate=1e-2, weight_decay=0.1, warmup=0.1)


def data_of(world: World, **options: Any) -> ModelTexts:
    text = TextSource(world.fit, held_out=world.test)
    return labelled_texts(world.model_x, **{"text": text, "batch_size": 16, "max_length": 60} | options)


def tune(
    world: World, folder: Path, *callbacks: pl.Callback, minutes: float = 10.0, seed: int = 3,
    data: ModelTexts | None = None, **trainer: Any,
) -> Path:  # fmt: skip
    """Fine-tune a classifier in a run's folder, or go on with it; returns its folder."""
    job = Job(0, world.model_x, Variant(), seed, Path(f"none/seed-{seed}"))
    saving = [SaveFinetuning(minutes).inside(folder), *callbacks]
    quiet = quiet_trainer(**{"max_epochs": EPOCHS, "callbacks": saving} | trainer)
    train(job, data or data_of(world), FAST, "accuracy", quiet, folder)
    assert quiet.num_training_batches == BATCHES
    assert not (folder / LAST).exists()  # of no use any more
    return folder / job.folder


def same(one: Path, other: Path) -> None:
    weights = [load_file(folder / "model.safetensors") for folder in (one, other)]
    for name, value in weights[0].items():
        assert torch.equal(weights[1][name], value), name
    rows = [read_sealed_json((folder / FINISHED).read_text()) | {"seconds": 0} for folder in (one, other)]
    assert rows[0] == rows[1]


@pytest.fixture(scope="module")
def whole(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier whose training nobody interrupted."""
    return tune(world, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(
    ("owner", "method", "call", "done"),
    [
        (Finetuning, "training_step", 1, 1),
        (torch.optim.AdamW, "step", 5, 5),
        (Finetuning, "training_step", BATCHES, BATCHES),  # a validation comes before the next batch
        (Finetuning, "validation_step", 1, BATCHES),
        (Finetuning, "training_step", BATCHES + 1, BATCHES + 1),
        (Finetuning, "validation_step", 2, 2 * BATCHES),  # no batch comes after it
    ],
)
def test_a_signal_anywhere_changes_nothing(
    world: World, whole: Path, tmp_path: Path, owner: type, method: str, call: int, done: int
) -> None:
    with strike(owner, method, call), pytest.raises(SystemExit):
        tune(world, tmp_path)
    assert state(tmp_path / LAST)["global_step"] == done
    same(tune(world, tmp_path), whole)


def test_it_is_saved_every_so_many_minutes_before_a_batch(world: World, whole: Path, tmp_path: Path) -> None:
    """From where a process that is killed goes on."""

    class Copy(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step > 1:  # before its first batch there was nothing to save
                shutil.copy(tmp_path / LAST, tmp_path / f"{trainer.global_step}.ckpt")

    tune(world, tmp_path, Copy(), minutes=1e-9)
    assert len(list(tmp_path.glob("*.ckpt"))) == EPOCHS * BATCHES - 1
    for step in (4, BATCHES + 1, EPOCHS * BATCHES):
        again = tmp_path / str(step)
        again.mkdir()
        shutil.copy(tmp_path / f"{step}.ckpt", again / LAST)
        assert state(again / LAST)["global_step"] == step - 1
        same(tune(world, again), whole)


def test_added_up_gradients_are_not_cut(world: World, tmp_path: Path) -> None:
    expected = tune(world, tmp_path / "whole", accumulate_grad_batches=2)
    with strike(Finetuning, "training_step", 3), pytest.raises(SystemExit):
        tune(world, tmp_path / "again", accumulate_grad_batches=2)
    assert state(tmp_path / "again" / LAST)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"] == 4
    same(tune(world, tmp_path / "again", accumulate_grad_batches=2), expected)


def test_what_is_kept_of_something_else_is_left_alone_or_refused(world: World, whole: Path, tmp_path: Path) -> None:
    with strike(Finetuning, "training_step", 2), pytest.raises(SystemExit):
        tune(world, tmp_path)
    last = (tmp_path / LAST).read_bytes()
    with pytest.raises(ValueError, match=r"The classifier in .*last\.ckpt is of a run with other data.*max_length"):
        tune(world, tmp_path, data=data_of(world, max_length=50))
    kept = state(tmp_path / LAST)
    other = {**kept, FINETUNING: {**kept[FINETUNING], "random": [torch.zeros(2, 5056, dtype=torch.uint8)]}}
    torch.save(other, tmp_path / LAST)
    with pytest.raises(ValueError, match=r"`trainer\.devices` to make 2 processes.*but got 1"):
        tune(world, tmp_path)
    (tmp_path / LAST).write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"last\.ckpt is not a fine-tuning checkpoint"):
        tune(world, tmp_path)
    (tmp_path / LAST).write_bytes(last)
    tune(world, tmp_path, seed=4)  # another classifier of the run begins anew
    same(tune(world, tmp_path), whole)
