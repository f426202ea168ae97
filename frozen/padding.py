"""Padding on the right, whichever side a batch came with it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["Layout"]


class Layout:
    """Turns a batch so that every text starts at position 0, and states back to the caller's order.

    Encoders count absolute positions from the start of the row, and their classifiers read the first one.
    Left padding silently moves both. Turning the rows puts it right for every architecture at once and moves
    no real token relative to another.

    Args:
        inputs: the batch; without an `attention_mask` nothing counts as padding.
    """

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self._rows: Tensor | None = None
        mask = inputs.get("attention_mask")
        if mask is None:
            return
        first = mask.ne(0).int().argmax(1)
        # On the CPU one look tells that there is nothing to do. On a GPU that look would wait for the device.
        if mask.device.type != "cpu" or bool(first.any()):
            self._rows = torch.arange(mask.shape[1], device=mask.device) + first[:, None]

    def turn(self, values: Tensor) -> Tensor:
        """(B, T, ...) as the caller has it -> (B, T, ...) starting with the first real token."""
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
