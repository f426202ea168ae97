"""A validation when the Trainer would not run one."""

from __future__ import annotations

from typing import Any, cast

import lightning.pytorch as pl

__all__ = ["validate_now"]


def validate_now(trainer: pl.Trainer) -> None:
    """Run a fit's own validation loop from its first batch, with all its hooks. Not from within a training step."""
    fitting = cast(Any, trainer)
    validation = fitting.fit_loop.epoch_loop.val_loop
    validation.restarting = False  # from its first batch
    validation.reset_restart_stage()
    fitting.validating = True
    validation.run()
    fitting.training = True
