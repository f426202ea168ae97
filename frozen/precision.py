"""The models may run in half precision; what is fitted and summed on their states may not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["check_precision"]


def check_precision(trainer: pl.Trainer) -> None:
    """Refuse what would round aligners, sums and figures along with the models.

    Raises:
        ValueError: `trainer.precision` is not 32-true.
    """
    if trainer.precision != "32-true":
        raise ValueError(
            f"Expected `trainer.precision` 32-true, but got {trainer.precision}: aligners and sums stay in full "
            "precision. For the two models, which take most of the time, set `data.dtype`, for example to bfloat16."
        )
