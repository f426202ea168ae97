"""Padding on the side where it is harmless, whichever side a batch came with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Layout"]


class Layout:
    """Turns a batch so that every text starts at position 0, or ends at the last, and states back.

    Most models count absolute positions from the start of the row, and their classifiers read the first token
    or the last real one: padding belongs on the right. XLNet's positions are relative and its classifier reads
    the end of the row: padding belongs on the left. The other side is silently wrong. Turning the rows puts it
    right for every architecture at once and moves no real token relative to another.

    Args:
        inputs: the batch; without an `attention_mask` nothing counts as padding.
        padding: the side where the model wants it.
    """

    def __init__(self, inputs: Mapping[str, Tensor], padding: Literal["left", "right"] = "right") -> None:
        self._rows: Tensor | None = None
        mask = inputs.get("attention_mask")
        if mask is None:
            return
        real = mask.ne(0).int()
        shift = real.argmax(1) if padding == "right" else -real.flip(1).argmax(1)
        # On the CPU one look tells that there is nothing to do. On a GPU that look would wait for the device.
        if mask.device.type != "cpu" or bool(shift.any()):
            self._rows = torch.arange(mask.shape[1], device=mask.device) + shift[:, None]

    def turn(self, values: Tensor) -> Tensor:
        """(B, T, ...) as the caller has it -> (B, T, ...) with the padding where the model wants it."""
        return values if self._rows is None else _take(values, self._rows % values.shape[1])

    def turn_back(self, values: Tensor) -> Tensor:
        """The inverse of `turn`."""
        if self._rows is None:
            return values
        columns = torch.arange(values.shape[1], device=values.device)
        return _take(values, (2 * columns - self._rows) % values.shape[1])


def _take(values: Tensor, rows: Tensor) -> Tensor:
    """values[b, rows[b, t]] for (B, T, ...) and (B, T)."""
    return values.gather(1, rows[(...,) + (None,) * (values.ndim - 2)].expand_as(values))
