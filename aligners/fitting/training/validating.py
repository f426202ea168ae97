"""Validations that the Trainer does not run by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import lightning.pytorch as pl


def let_end(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> bool:
    """Tell whether a checkpoint has all of `max_steps`, and if so let the run validate; Lightning would just return."""
    complete = 0 < trainer.max_steps <= checkpoint["global_step"]
    if complete:
        cast(Any, trainer).fit_loop.epoch_loop.max_steps = -1
    return complete


def validate_if_due(trainer: pl.Trainer, validated_at: int | None, complete: bool) -> None:
    """Validate before the first batch of a run, if the current step still lacks its validation.

    It does at the start, which training has to beat, and when an interruption cut a validation off.

    Args:
        trainer: the run's Trainer, after its training loader was set up.
        validated_at: step of the last validation; None if there was none.
        complete: whether this is the last step.
    """
    fitting = cast(Any, trainer)
    if validated_at == trainer.global_step or not fitting.enable_validation:
        return
    epochs = trainer.check_val_every_n_epoch
    interval = fitting.val_check_batch if epochs is None else epochs * trainer.num_training_batches
    if complete or trainer.global_step % interval == 0:
        _validate_now(fitting)


def _validate_now(fitting: Any) -> None:
    """Run a fit's own validation loop from its first batch, with all its hooks. Not from within a training step."""
    validation = fitting.fit_loop.epoch_loop.val_loop
    validation.restarting = False  # from its first batch
    validation.reset_restart_stage()
    fitting.validating = True
    validation.run()
    fitting.training = True
