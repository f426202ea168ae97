"""Converts between the caller's layout of a batch and the model's: side of the padding, and device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Layout"]


class Layout:
    """Turns a batch so that every text starts at position 0, or ends at the last, and states back.

    It also moves the batch to the model's device, and results back to that of `input_ids`.

    Most models count absolute positions from the start of the row, and their classifiers read the first token
    or the last real one: padding belongs on the right. XLNet's positions are relative and its classifier reads
    the end of the row: padding belongs on the left. On the other side, answers are wrong without an error. Turning the
    rows corrects this for every architecture at once and moves no real token relative to another.

    Args:
        inputs: the batch; without an `attention_mask` nothing counts as padding.
        padding: the side on which the model wants padding.
        device: where the model wants the batch; None: where the batch is.
    """

    def __init__(
        self,
        inputs: Mapping[str, Tensor],
        padding: Literal["left", "right"] = "right",
        device: torch.device | None = None,
    ) -> None:
        self._there = device
        self._home = None if device is None else inputs["input_ids"].device
        self._rows: Tensor | None = None
        mask = inputs.get("attention_mask")
        if mask is None:
            return
        real = mask.ne(0).int()
        shift = real.argmax(1) if padding == "right" else -real.flip(1).argmax(1)
        # On the CPU it is cheap to see that there is nothing to do; on a GPU that would wait for the device.
        if mask.device.type != "cpu" or bool(shift.any()):
            self._rows = (torch.arange(mask.shape[1], device=mask.device) + shift[:, None]).to(device)

    def turn(self, values: Tensor) -> Tensor:
        """(B, T, ...) as the caller has it, on any device -> (B, T, ...) with the padding where the model wants it."""
        values = values.to(self._there)
        return values if self._rows is None else _take(values, self._rows % values.shape[1])

    def turn_back(self, values: Tensor) -> Tensor:
        """The inverse of `turn`, on the caller's device."""
        if self._rows is None:
            return self.bring_back(values)
        values = values.to(self._there)
        columns = torch.arange(values.shape[1], device=values.device)
        return self.bring_back(_take(values, (2 * columns - self._rows) % values.shape[1]))

    def bring_back(self, values: Tensor) -> Tensor:
        """Move what has no token axis, (B, ...), to the caller's device."""
        return values.to(self._home)


def _take(values: Tensor, rows: Tensor) -> Tensor:
    """values[b, rows[b, t]] for (B, T, ...) and (B, T)."""
    return values.gather(1, rows[(...,) + (None,) * (values.ndim - 2)].expand_as(values))
