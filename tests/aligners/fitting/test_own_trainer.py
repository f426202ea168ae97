"""A fit by the user's own Trainer, as it comes, is the fit of the command, bit for bit."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from tests.runs import activations
from tests.stitches import model_texts
from tests.tiny import tiny_folder, tiny_model
from tests.world import World
from torch import nn

from aligners.callbacks.best import BestPerSite
from aligners.cli.table import train
from aligners.datamodules.model_texts import labelled_texts
from aligners.datamodules.pairings import universe_states
from aligners.errors import UserError
from aligners.finetuning.classifier_training import Finetuning, FinetuningRecipe
from aligners.fitting.alignment import Alignment
from aligners.fitting.saved_bank import load_bank
from aligners.fitting.universe.universe_alignment import UniverseAlignment
from aligners.injection.stitching.stitching_training import Stitching
from aligners.maps.inn import INN
from aligners.maps.linear import Linear
from aligners.maps.mlp import MLP

SHORT: dict[str, Any] = {"most_steps": 25}
FAST = partial(torch.optim.AdamW, lr=0.1)  # validation gets worse at some sites


def own_trainer(folder: Path, **options: Any) -> pl.Trainer:
    """With everything that Lightning does by default: a sanity check, checkpoints, a logger."""
    return pl.Trainer(accelerator="cpu", enable_progress_bar=False, default_root_dir=folder, **options)


def run_command(folder: Path, world: World, *words: str) -> dict[str, Any]:
    """The maps that the command leaves."""
    pair = ["--data.model_x", world.model_x, "--data.model_y", world.model_y] if words[0] == "fit" else []
    texts = ["--data.text.source", world.fit, "--data.text.held_out", world.test, "--data.batch_size", "16"]
    quiet = ["--trainer.accelerator", "cpu", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false"]
    with pytest.MonkeyPatch.context() as patch:  # what comes after the fit
        patch.setattr(pl.Trainer, "validate", lambda *given, **options: None)
        patch.setattr(pl.Trainer, "test", lambda *given, **options: None)
        train([*words, *pair, *texts, *quiet, "--run", str(folder)])
    (file,) = folder.glob("*.safetensors")
    return {route: nn.ModuleDict(maps).state_dict() for route, maps in load_bank(file).maps.items()}


def held(module: Any) -> dict[str, Any]:
    return {route: nn.ModuleDict(module.banks_of(route)).state_dict() for route in module.maps}


def check_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for route, maps in theirs.items():
        assert maps.keys() == ours[route].keys()
        for name, value in maps.items():
            assert torch.equal(value, ours[route][name]), name


def test_own_trainer_fits_the_maps_of_the_command(
    world: World, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    words = ["--data.sites", "[1, 3]", "--data.max_length", "64", "--data.held_out_types", "0"]
    maps = "{linear: Linear, mlp: {class_path: MLP, init_args: {hidden: [8], skip: false}}}"
    fast = ["--model.most_steps", "25", "--model.schedule", "constant", "--model.warmup", "0"]
    fast += ["--model.averaging", "false"]  # last weights, which a long way on are not the best
    theirs = run_command(tmp_path / "run", world, "fit", *words, "--model.aligners", maps, *fast)
    aligners = {"linear": Linear, "mlp": partial(MLP, hidden=[8], skip=False)}
    module = Alignment(aligners, schedule="constant", warmup=0.0, averaging=False, **SHORT)
    trainer = own_trainer(tmp_path)
    trainer.fit(module, datamodule=activations(world, sites=[1, 3]))
    assert trainer.global_step == 25
    check_equal(held(module), theirs)
    (record,) = module.training_record.values()
    assert min(record["best_step"]) < 25  # the last state is not the best everywhere
    assert not [str(w.message) for w in recwarn if "max_epochs" in str(w.message)]


def test_a_length_that_the_trainer_is_given_counts(world: World, tmp_path: Path) -> None:
    for given, steps in (({"max_epochs": 1}, 11), ({"max_steps": 3}, 3)):
        trainer = own_trainer(tmp_path, logger=False, **given)
        trainer.fit(Alignment({"inn": partial(INN, couplings=2, hidden=4)}), datamodule=activations(world, sites=[1]))
        assert trainer.global_step == steps


def test_a_trainer_keeps_its_own_callback(world: World, tmp_path: Path) -> None:
    mine = BestPerSite(patience=1)
    trainer = own_trainer(tmp_path, logger=False, callbacks=[mine])
    module = Alignment({"mlp": partial(MLP, hidden=[8], skip=False)}, optimizer=FAST, schedule="constant", warmup=0.0)
    trainer.fit(module, datamodule=activations(world, sites=[1]))
    assert [callback for callback in trainer.callbacks if isinstance(callback, BestPerSite)] == [mine]
    assert trainer.should_stop
    assert trainer.global_step < 500


def test_a_second_fit_asks_for_a_new_trainer(world: World, tmp_path: Path) -> None:
    trainer = own_trainer(tmp_path, logger=False, max_steps=2)
    for number in range(2):
        module = Alignment({"mlp": partial(MLP, hidden=[8])})
        if number:
            with pytest.raises(ValueError, match="Expected a new Trainer, but this one has taken 2 steps"):
                trainer.fit(module, datamodule=activations(world, sites=[1]))
        else:
            trainer.fit(module, datamodule=activations(world, sites=[1]))


def test_own_trainer_resumes_from_a_checkpoint_of_lightning(world: World, tmp_path: Path) -> None:
    def fitted(folder: str, resume: str | None = None, **options: Any) -> Alignment:
        module = Alignment({"mlp": partial(MLP, hidden=[8], skip=False)}, optimizer=FAST, **SHORT)
        trainer = own_trainer(tmp_path / folder, logger=False, **options)
        trainer.fit(module, datamodule=activations(world, sites=[1, 3]), ckpt_path=resume)
        return module

    whole = fitted("whole")
    stopping = StopAt(12)
    fitted("first", callbacks=[stopping])
    resumed = fitted("second", resume=str(stopping.saved))
    check_equal(held(resumed), held(whole))
    assert resumed.training_record == whole.training_record


class StopAt(pl.Callback):
    """Saves a checkpoint after some steps and ends the fit."""

    def __init__(self, step: int) -> None:
        self.step, self.saved = step, Path()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.saved = Path(trainer.default_root_dir) / "stopped.ckpt"
            trainer.save_checkpoint(self.saved)
            trainer.should_stop = True


def test_own_trainer_stitches_the_layers_of_the_command(world: World, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(Stitching, "usual_steps", 6)
    every = ["--trainer.val_check_interval", "2", "--trainer.max_steps", "6"]
    models = ["--data.models", f"[{world.model_x}, {world.model_y}]", "--data.sites", "[2]", "--data.max_length", "60"]
    theirs = run_command(tmp_path / "run", world, "stitch", *models, *every, "--model.routes", "forward")
    module = Stitching(routes="forward")
    trainer = own_trainer(tmp_path, val_check_interval=2, check_val_every_n_epoch=None)
    trainer.fit(module, datamodule=model_texts(world, sites=[2]))
    assert trainer.global_step == 6
    assert [point["step"] for point in module.curves] == [0, 2, 4, 6]
    check_equal(held(module), theirs)


def test_own_trainer_fine_tunes_for_three_epochs_and_clips(world: World, tmp_path: Path) -> None:
    weights = []
    for given in ({}, {"max_epochs": 3, "gradient_clip_val": 1.0}, {"gradient_clip_val": 0.0}):
        model = tiny_model("bert", initializer_range=0.5).requires_grad_(True)
        trainer = own_trainer(tmp_path, logger=False, enable_checkpointing=False, **given)
        data = labelled_texts(world.model_x, text=world.text, batch_size=64, max_length=60)
        trainer.fit(Finetuning(model, FinetuningRecipe(learning_rate=1e-2)), datamodule=data)
        assert trainer.global_step == 3 * trainer.num_training_batches
        weights.append(model.classifier.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_own_trainer_fits_a_universe(world: World, tmp_path: Path) -> None:
    third = str(tiny_folder(tmp_path / "third", seed=2))
    module = UniverseAlignment(partial(INN, couplings=2, hidden=4), most_steps=3)
    models = [world.model_x, world.model_y, third]
    data = universe_states(models, sites=[1], text=world.text, held_out_types=0.0, max_length=64)
    trainer = own_trainer(tmp_path, logger=False)
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == 3
    assert module.training_record


def test_averages_of_weights_are_refused_before_training(world: World, tmp_path: Path) -> None:
    for average in (pl.callbacks.StochasticWeightAveraging(swa_lrs=0.01), pl.callbacks.EMAWeightAveraging()):
        trainer = own_trainer(tmp_path, callbacks=[average], logger=False)
        with pytest.raises(UserError, match=f"without averages of weights, but got {type(average).__name__}"):
            trainer.fit(Alignment({"mlp": MLP}), activations(world))


def test_maps_of_other_shapes_in_a_checkpoint_are_refused_by_name(world: World) -> None:
    module = Alignment({"linear": Linear})
    with pytest.raises(UserError, match=r"maps of the checkpoint do not fit .*Unexpected key\(s\) .*other\.weight"):
        module.load_state_dict({"other.weight": torch.zeros(1)})
