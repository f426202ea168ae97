from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from tests.interrupting import Interrupt, strike
from tests.runs import state
from tests.stitches import evaluate, model_texts, train
from tests.world import World

from aligners.callbacks.best import BestPerSite
from aligners.callbacks.checkpoint import SaveStitching
from aligners.fitting.saved_bank import load_bank
from aligners.injection.stitching.measuring import StitchingEvaluation
from aligners.injection.stitching.stitching_training import Stitching
from aligners.maps.affine import AffineLayer, LowRank
from aligners.maps.mlp import MLP

MIXED = {"mlp": partial(MLP, hidden=[8]), "low": partial(LowRank, rank=3), "norm": partial(AffineLayer, norm=True)}
STEPS, INTERVAL, BATCHES = 9, 4, 6  # so that a validation lies in the middle of the first and of the second pass


def run(
    world: World, folder: Path, *callbacks: pl.Callback, resume: Path | None = None, layers: Any = MIXED, **given: Any
) -> Stitching:
    steps = {"max_steps": STEPS, "val_check_interval": INTERVAL}
    watching = [SaveStitching(folder), BestPerSite(), *callbacks]  # in whatever order
    usual = {"routes": "different", "batch_size": 29}
    module = train(world, layers, resume=resume, trainer={**steps, "callbacks": watching}, **usual | given)
    assert module.trainer.num_training_batches == BATCHES
    return module


@pytest.fixture(scope="module")
def whole(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    run(world, folder)
    return folder


def same_end(folder: Path, expected: Path) -> None:
    """Equal layers and equal learning curves."""
    found, wanted = (load_bank(place / "stitching.safetensors") for place in (folder, expected))
    assert found.curves == wanted.curves
    for route, layers in wanted.maps.items():
        for name, layer in layers.items():
            for key, value in layer.state_dict().items():
                assert torch.equal(found.maps[route][name].state_dict()[key], value), (route, name, key)


def test_a_run_interrupted_by_ctrl_c_before_a_validation_ends_where_it_would_have(
    world: World, whole: Path, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        run(world, tmp_path, Interrupt("on_train_batch_end", INTERVAL))
    with pytest.raises(ValueError, match=r"last\.ckpt is a checkpoint to resume from: `train\.py stitch --ckpt_path"):
        load_bank(tmp_path / "last.ckpt")
    assert state(tmp_path / "last.ckpt")["global_step"] == INTERVAL
    run(world, tmp_path, resume=tmp_path / "last.ckpt")
    same_end(tmp_path, whole)


@pytest.mark.parametrize(
    ("owner", "method", "call"),
    [
        (Stitching, "training_step", 7),  # the first of an epoch
        (torch.optim.lr_scheduler.LambdaLR, "step", 1 + 5),  # between a step and its learning rate
        (Stitching, "validation_step", 1 + 1),  # after that of the start
        (BestPerSite, "_compare", 6 + 4),
        (Stitching, "on_validation_epoch_start", 4),  # of the last validation
    ],
)
def test_a_signal_anywhere_changes_nothing(
    world: World, whole: Path, tmp_path: Path, owner: type, method: str, call: int
) -> None:
    with strike(owner, method, call), pytest.raises(SystemExit):
        run(world, tmp_path)
    assert not (tmp_path / "stitching.safetensors").exists()
    run(world, tmp_path, resume=tmp_path / "last.ckpt")
    same_end(tmp_path, whole)


def test_it_goes_on_from_the_last_validation_too(world: World, whole: Path, tmp_path: Path) -> None:
    """As after a crash, when nothing could be written any more."""

    class Break(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
            if trainer.global_step == 6:
                raise ValueError("broken on purpose")

    with pytest.raises(ValueError, match="broken on purpose"):
        run(world, tmp_path, Break())
    assert state(tmp_path / "last.ckpt")["global_step"] == 4
    run(world, tmp_path, resume=tmp_path / "last.ckpt")
    same_end(tmp_path, whole)


def test_masks_and_worker_processes_resume_too(world: World, masked: list[str], tmp_path: Path) -> None:
    given: dict[str, Any] = {"models": masked, "layers": {"norm": MIXED["norm"]}, "routes": "forward"}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(world, whole, **given)
    with pytest.raises(SystemExit):
        run(world, broken, Interrupt("on_train_batch_end", 8), **given)
    run(world, broken, resume=broken / "last.ckpt", workers=1, **given)
    same_end(broken, whole)


def test_before_the_first_step_there_is_nothing_to_keep(world: World, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(world, tmp_path, Interrupt("on_train_batch_start", 1))
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_measuring_leaves_the_trained_layers_alone(world: World, tmp_path: Path) -> None:
    module = run(world, tmp_path, layers={"norm": MIXED["norm"]}, routes="forward")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {"last.ckpt", "stitching.safetensors"}
    evaluation = StitchingEvaluation(load_bank(tmp_path / "stitching.safetensors"))
    module.trainer.callbacks.append(Interrupt("on_test_batch_end", 1))  # type: ignore[attr-defined]
    with pytest.raises(SystemExit):
        module.trainer.test(evaluation, datamodule=model_texts(world), verbose=False)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_state_of_no_meaning_is_not_written(world: World, tmp_path: Path) -> None:
    """The last good file stays, although the step that is interrupted has gone wrong."""

    class Spoil(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
            if trainer.global_step == 7:
                module.maps["0_1"]["norm"].affine.weight.data[0] = torch.nan

    with pytest.raises(ValueError, match=r"training loss.*norm, .*site pair 1-2"):
        run(world, tmp_path, Spoil(), Interrupt("on_train_batch_end", 8))
    content = state(tmp_path / "last.ckpt")
    assert content["global_step"] == 4
    assert all(value.isfinite().all() for value in content["state_dict"].values())


def test_what_was_stored_comes_back(world: World, whole: Path) -> None:
    stored, content = load_bank(whole / "stitching.safetensors"), state(whole / "last.ckpt")
    assert stored.pairs == {"0_1": [(1, 2), (3, 3)], "1_0": [(2, 1), (3, 3)]}
    assert [model["name"] for model in stored.data["models"]] == [world.model_x, world.model_y]
    assert stored.data_config["batch_size"] == 29
    assert stored.loss == {"task": 1.0, "distillation": 0.0, "temperature": 1.0, "activation": 0.0}
    assert {point["step"] for point in stored.curves} == {0, 4, 8, 9}
    assert stored.spread["0_1"]["mean"].shape == (2, 16)
    low = stored.maps["1_0"]["low"]
    assert isinstance(low, LowRank)
    assert low.rank == 3
    assert not any(weight.requires_grad for weight in low.parameters())
    assert not low.training
    (best,) = [value for name, value in content["callbacks"].items() if "BestPerSite" in name]
    for name, value in best["kept"]["1_0.low"].items():  # the finished file holds the best of each site
        assert torch.equal(value, low.state_dict()[name])
    assert {name.split(".")[0] for name in content["state_dict"]} == {"maps"}  # and no model
    assert (whole / "last.ckpt").stat().st_size < 400_000


def test_going_on_with_something_else_is_refused(world: World, whole: Path, tmp_path: Path) -> None:
    last = whole / "last.ckpt"
    for given, says in (
        (
            {"models": [world.model_x, world.model_x]},
            r"checkpoint .*last\.ckpt was fitted on other models: model 1 was .*/y .*and is .*/x .*same order",
        ),
        ({"sites": ["1:3", 3]}, r"`model\.routes\.0_1` was \[\[1, 2\].* and is \[\[1, 3\]"),
        ({"component": "mlp"}, r"`data\.component` was \"residual\" and is \"mlp\""),
        ({"routes": "forward"}, r"`model\.routes\.1_0` was .* and is null"),
        ({"layers": {**MIXED, "low": partial(LowRank, rank=4)}}, r"layers\.0_1\.low\.options\.rank` was 3 and is 4"),
    ):
        with pytest.raises(ValueError, match=says):
            run(world, tmp_path, resume=last, **given)
    torch.save({"pytorch-lightning_version": "2.6.0", "state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"`ckpt_path` to be a last\.ckpt of `train\.py stitch`"):
        run(world, tmp_path, resume=tmp_path / "other.ckpt")
    fewer = {"max_steps": STEPS - 1, "callbacks": [SaveStitching(tmp_path)]}
    with pytest.raises(ValueError, match=r"`trainer\.max_steps` was 9 and is 8"):
        train(world, MIXED, resume=last, trainer=fewer, routes="different", batch_size=29)
    assert not (tmp_path / "last.ckpt").exists()


def test_a_run_that_is_complete_ends_as_it_did(world: World, whole: Path, tmp_path: Path) -> None:
    """A kill between the finished layers and their report must not need another command."""
    run(world, tmp_path / "again", resume=whole / "last.ckpt")
    same_end(tmp_path / "again", whole)


def test_measuring_with_other_models_or_sites_is_refused(world: World, whole: Path) -> None:
    stored = load_bank(whole / "stitching.safetensors")
    for given, says in (
        ({"models": [world.model_y, world.model_x]}, r"stitching\.safetensors was fitted on other models"),
        ({"sites": [1]}, r"holds maps of the site pairs \[\(1, 2\), \(3, 3\)\].*Leave `data\.sites` out"),
    ):
        with pytest.raises(ValueError, match=says):
            evaluate(world, stored, data=given)
