"""Paired rows that are kept in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aligners.files.room import free_memory, in_words

__all__ = ["Held", "check_room", "gathered"]


class Held(NamedTuple):
    """Paired rows: x (S, N, d_x), y (S, N, d_y), and which are of unseen types (N,), if rows have types."""

    x: Tensor
    y: Tensor
    unseen: Tensor | None

    def turned(self) -> Held:
        """The same from Y to X."""
        return Held(self.y, self.x, self.unseen)


def gathered(batches: Iterable[Any], most: int) -> Held:
    """Join batches of paired rows, and keep the first `most` rows.

    Args:
        batches: `PairedBatch`es, or parts as of `Held`.
        most: how many rows.
    """
    parts: list[Held] = []
    left = most
    for batch in batches:
        unseen = batch.unseen if isinstance(batch, Held) else batch.rows.unseen
        parts.append(Held(batch.x[:, :left], batch.y[:, :left], None if unseen is None else unseen[:left]))
        left -= parts[-1].x.shape[1]
        if left <= 0:
            break
    marks = [part.unseen for part in parts if part.unseen is not None]
    return Held(
        torch.cat([part.x for part in parts], 1),
        torch.cat([part.y for part in parts], 1),
        torch.cat(marks) if len(marks) == len(parts) else None,
    )


def check_room(rows: int, sites: int, widths: int, device: torch.device) -> None:
    """Raise if fitting rows and held-out rows, and the copy that joining them takes, may not fit in memory.

    Args:
        rows: of each kind.
        sites: S.
        widths: d_x + d_y.
        device: where they are kept.

    Raises:
        ValueError: they take more than half of what is free.
    """
    size, free = 3 * 4 * rows * sites * widths, free_memory(device)
    if size > free / 2:
        raise ValueError(
            f"Expected `most_rows` rows at {sites} site pairs to fit in half of the free memory, "
            f"{in_words(free / 2)}, but {rows:,} take {in_words(size)}. Give fewer, or fewer `data.sites`."
        )
