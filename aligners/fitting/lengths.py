"""How long a module trains where the Trainer does not say: the same with the commands' Trainer and with the user's."""

from typing import cast

import lightning.pytorch as pl


class KnownLength(pl.LightningModule):
    """Trains as long as it is meant to where the Trainer names no length; Lightning would take 1,000 epochs.

    What the Trainer is given counts: `max_epochs`, `max_steps` or `max_time`.

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
        if trainer is not None and trainer.state.fn == "fit" and _has_no_length(trainer):
            trainer.fit_loop.max_epochs = self.usual_epochs
            trainer.fit_loop.epoch_loop.max_steps = self.usual_steps
        cast(property, pl.LightningModule.trainer).fset(self, trainer)  # type: ignore[misc]


def _has_no_length(trainer: pl.Trainer) -> bool:
    return trainer.max_epochs is None and trainer.max_steps == -1
