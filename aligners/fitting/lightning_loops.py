"""Access to the loops inside Lightning's Trainer for which Lightning has no public interface.

`tests/aligners/fitting/test_lightning_loops.py` fails where another version of Lightning has none of these names.
"""

from typing import Any, cast

import lightning.pytorch as pl


class KnownLength(pl.LightningModule):
    """Trains for its usual length if the Trainer names none; Lightning would take 1,000 epochs.

    These options of the Trainer take precedence: `max_epochs`, `max_steps` or `max_time`.

    Attributes:
        usual_epochs: epochs of a training; -1: as many as the steps take.
        usual_steps: steps of a training; -1: as many as the epochs have, or until the module itself ends it.
    """

    usual_epochs = -1
    usual_steps = -1

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer that the module is attached to."""
        return super().trainer

    @trainer.setter
    def trainer(self, trainer: pl.Trainer | None) -> None:
        # Lightning attaches the Trainer just before it puts 1,000 epochs in the place of a length that is not set.
        if trainer is not None and _names_no_length(trainer):
            trainer.fit_loop.max_epochs = self.usual_epochs
            trainer.fit_loop.epoch_loop.max_steps = self.usual_steps
        cast(property, pl.LightningModule.trainer).fset(self, trainer)  # type: ignore[misc]


def _names_no_length(trainer: pl.Trainer) -> bool:
    return (
        trainer.state.fn == "fit"
        and trainer.max_epochs is None
        and trainer.max_steps == -1
    )


def attached_trainer(module: pl.LightningModule) -> pl.Trainer | None:
    """Return the Trainer that a module is attached to; None if it is not attached, where `module.trainer` raises."""
    return module._trainer


def validate_if_due(
    trainer: pl.Trainer, validated_at: int | None, complete: bool
) -> None:
    """Validate before the first batch of a run, if the current step still lacks its validation.

    That is so at the start, which training must beat, and after an interruption that cut a validation off. Lightning
    only validates after steps.

    Args:
        trainer: the run's Trainer, after its training loader was set up.
        validated_at: step of the last validation; None if there was none.
        complete: whether this is the last step.
    """
    fitting = cast(Any, trainer)
    if validated_at == trainer.global_step or not fitting.enable_validation:
        return
    interval = fitting.val_check_batch
    if trainer.check_val_every_n_epoch is not None:
        interval = trainer.check_val_every_n_epoch * trainer.num_training_batches
    if complete or trainer.global_step % interval == 0:
        validation = fitting.fit_loop.epoch_loop.val_loop
        validation.restarting = False  # from its first batch
        validation.reset_restart_stage()
        fitting.validating = True
        validation.run()
        fitting.training = True


def lift_most_steps(trainer: pl.Trainer) -> None:
    """Let a resumed run that has taken all its steps begin, to validate it: Lightning would just return."""
    trainer.fit_loop.epoch_loop.max_steps = -1


def make_training_loader_again(trainer: pl.Trainer) -> None:
    """Let the Trainer make its training loader again, once the place where a resumed run continues is known.

    Asking for its number of steps has made the loader already, for a run from the beginning.
    """
    trainer.fit_loop._combined_loader = None
