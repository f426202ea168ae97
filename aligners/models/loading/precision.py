"""Models may run in half precision; aligners and sums may not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aligners.errors import UserError

if TYPE_CHECKING:
    import lightning.pytorch as pl


def check_precision(trainer: pl.Trainer, allowed: Sequence[str] = ("32-true",)) -> None:
    """Raise if the Trainer's precision would round aligners, sums and figures along with the models.

    Args:
        trainer: of the run.
        allowed: precisions that leave them in full precision.

    Raises:
        ValueError: `trainer.precision` is not among `allowed`.
    """
    if trainer.precision not in allowed:
        raise UserError(
            f"Expected `trainer.precision` {' or '.join(allowed)}, but got {trainer.precision}: aligners and sums stay "
            "in full precision. For the models, which take most of the time, set `data.dtype`, for example to bfloat16."
        )
