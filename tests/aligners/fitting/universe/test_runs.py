"""Runs of a universe: interrupted, on two ranks, from a store, and of embedded models that another one joins."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from aligners.fitting.universe.fitting import UniverseAlignment
from aligners.maps.inn import INN
from callbacks.best import BestPerSite
from callbacks.checkpoint import SaveAligners
from datamodules.pairings import universe_states
from datamodules.states import States
from datamodules.text.sources import TextSource
from tests.interrupting import strike
from tests.ranks import two_ranks
from tests.runs import quiet_trainer
from tests.tiny import tiny_folder
from tests.world import World

ON_TWO = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}


@pytest.fixture(scope="module")
def models(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [world.model_x, world.model_y, str(tiny_folder(tmp_path_factory.mktemp("third") / "z", seed=2))]


def states(world: World, models: list[str], **options: Any) -> States:
    given: dict[str, Any] = {"sites": [1, 3], "batch_size": 32, "max_length": 64, "held_out_types": 0.0, **options}
    return universe_states(models, text=TextSource(world.fit, held_out=world.test), **given)


def fitted(
    world: World,
    models: list[str],
    folder: Path | None = None,
    resume: Path | None = None,
    closed_form: tuple[str, ...] = ("procrustes", "gcca"),
    on: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[pl.Trainer, UniverseAlignment]:
    data = states(world, models, **options)
    module = UniverseAlignment(partial(INN, couplings=2, hidden=8, start="procrustes"), closed_form)
    watching: list[pl.Callback] = [BestPerSite()]
    if folder is not None:
        watching.append(SaveAligners(folder))
    trainer = quiet_trainer(max_epochs=2, callbacks=watching, **(on or {}))
    trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
    return trainer, module


@pytest.fixture(scope="module")
def whole(world: World, models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    fitted(world, models, folder)
    return folder


@pytest.mark.parametrize(
    ("owner", "method", "call"),
    [
        (UniverseAlignment, "training_step", 3),
        (UniverseAlignment, "validation_step", 4),
    ],
)
def test_an_interrupted_run_ends_where_it_would_have(
    world: World, models: list[str], whole: Path, tmp_path: Path, owner: type, method: str, call: int
) -> None:
    with strike(owner, method, call), pytest.raises(SystemExit):
        fitted(world, models, tmp_path)
    assert not (tmp_path / "universe.ckpt").exists()
    fitted(world, models, tmp_path, resume=tmp_path / "last.ckpt")
    for path in ("universe.ckpt", "pairs/x--z/aligners.ckpt"):
        assert (tmp_path / path).read_bytes() == (whole / path).read_bytes()


def trained(rank: int, world: World, models: list[str]) -> dict[str, Tensor]:
    """Held-out states in the shared space, and the validation FVU, of a run on one rank (-1) or on two."""
    _, module = fitted(world, models, on=ON_TWO if rank >= 0 else None, closed_form=("procrustes",))
    x = next(iter(states(world, models).batches("test"))).x
    found = {fit.name: module.validation_figures[fit]["fvu"] for fit in module.fits()}
    with torch.no_grad():  # not the weights: what a model's null direction does is decided by the last digit
        return {**found, **{f"{name} of x": space.embed(x) for name, space in module.universes().items()}}


def test_two_ranks_fit_what_one_does(world: World, models: list[str], tmp_path: Path) -> None:
    alone = trained(-1, world, models)
    for found in two_ranks(partial(trained, world=world, models=models), tmp_path, meet=False):
        assert set(found) == set(alone)
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-3, msg=name)


def test_too_few_rows_for_a_closed_form_are_refused_before_training(world: World, models: list[str]) -> None:
    with pytest.raises(ValueError, match="rows than the 3 models have dimensions together, 48, but got 18"):
        fitted(world, models, rows="mean", batch_size=20, on={"limit_train_batches": 1})
