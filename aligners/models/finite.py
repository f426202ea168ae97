"""Stops a run at non-finite values without synchronising with the device at every batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from aligners.errors import UserError

MOST_PENDING = 256


class FiniteCheck:
    """Checks values once the device has computed them, and never waits for it before `flush`.

    Asking a device for a value waits for it. The flags of a batch are therefore copied to the host after the batch's
    own work, and read once that copy has ended: a non-finite value is reported a few batches late, under its own name
    and batch. On the CPU that is the next batch.
    """

    def __init__(self) -> None:
        self._pending: list[_Entry] = []

    def watch(self, values: Tensor, names: list[str], what: str, batch: int) -> None:
        """Queue values whose leading axis is named by `names`, and raise for those queued before.

        Args:
            values: (S, ...) floating point.
            names: S names, such as "site 3".
            what: what the values are, for the message.
            batch: the number of the batch that they belong to.

        Raises:
            ValueError: an earlier batch held NaN or infinity.
        """
        while self._pending and self._pending[0].batch != batch and self._pending[0].ready():
            _refuse(self._pending.pop(0))
        if len(self._pending) >= MOST_PENDING:
            self.flush()
        # A sum is finite only if every term is: one pass and no boolean copy of the states.
        finite = values.detach().float().reshape(len(values), -1).sum(1).isfinite()
        on_host, copied = finite.to("cpu", non_blocking=True), None
        if finite.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(finite.device))
        self._pending.append(_Entry(on_host, copied, names, what, batch))

    def flush(self) -> None:
        """Check everything that is still queued."""
        pending, self._pending = self._pending, []
        for entry in pending:
            if entry.copied is not None:
                entry.copied.synchronize()
            _refuse(entry)


class _Entry(NamedTuple):
    """Flags that are copied to the host, and what to wait for until they are there."""

    finite: Tensor
    copied: torch.cuda.Event | None
    names: list[str]
    what: str
    batch: int

    def ready(self) -> bool:
        return self.copied is None or self.copied.query()


def _refuse(entry: _Entry) -> None:
    bad = [name for name, fine in zip(entry.names, entry.finite.tolist(), strict=True) if not fine]
    if bad:
        places = ", ".join(dict.fromkeys(bad))
        raise UserError(
            f"Expected finite {entry.what}, but batch {entry.batch} holds NaN or infinity at {places}. "
            "Look at the texts of that batch, use float32 instead of a half precision, or lower the learning rate."
        )
