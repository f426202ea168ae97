"""What we use of the inside of Lightning's loops is still there; what it does is tested with the runs that need it."""

import lightning.pytorch as pl
import pytest
from tests.runs import quiet_trainer

from aligners.fitting.lightning_loops import attached_trainer, lift_most_steps


@pytest.mark.parametrize(
    "name",
    [
        "enable_validation",
        "val_check_batch",
        "validating",
        "training",
        "fit_loop.max_epochs",
        "fit_loop._combined_loader",
        "fit_loop.epoch_loop.max_steps",
        "fit_loop.epoch_loop.val_loop.restarting",
        "fit_loop.epoch_loop.val_loop.reset_restart_stage",
        "fit_loop.epoch_loop.val_loop.run",
    ],
)
def test_lightning_has_what_is_reached_for(name: str) -> None:
    found: object = quiet_trainer(max_steps=3)
    for part in name.split("."):
        assert hasattr(found, part) or part in getattr(type(found), "__annotations__", {}), name
        found = getattr(found, part, None)


def test_a_trainer_whose_steps_are_lifted_has_no_end_and_a_new_module_no_trainer() -> None:
    trainer = quiet_trainer(max_steps=3)
    lift_most_steps(trainer)
    assert trainer.max_steps == -1
    assert attached_trainer(pl.LightningModule()) is None
