"""Paired rows that are kept in memory: how a run reads those of the held-out texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.files.room import free_memory, in_words
from datamodules.module import stream_of
from datamodules.rows.reading import PairedBatch, Plan
from datamodules.states import States
from datamodules.text.sources import TextSource


class PairedRows(NamedTuple):
    """Paired rows: x (S, N, d_x), y (S, N, d_y), and which are of unseen types (N,), if rows have types."""

    x: Tensor
    y: Tensor
    unseen: Tensor | None

    def turned(self) -> PairedRows:
        """The same from Y to X."""
        return PairedRows(self.y, self.x, self.unseen)

    @classmethod
    def of(cls, batches: Iterable[PairedBatch], most: int) -> PairedRows:
        """The first `most` rows of batches, of which no more are read than that takes."""
        parts: list[PairedRows] = []
        left = most
        for batch in batches:
            unseen = batch.rows.unseen
            parts.append(cls(batch.x[:, :left], batch.y[:, :left], None if unseen is None else unseen[:left]))
            left -= parts[-1].x.shape[1]
            if left <= 0:
                break
        x, y, marks = zip(*parts, strict=True)
        known = [mark for mark in marks if mark is not None]
        return cls(torch.cat(x, 1), torch.cat(y, 1), torch.cat(known) if len(known) == len(parts) else None)


class RowsInMemory(pl.LightningModule):
    """Keeps the rows of the held-out texts that a test reads, and of another source's.

    Args:
        most: rows of each that are kept.
        other: the other source.
    """

    def __init__(self, most: int, other: TextSource | None = None) -> None:
        super().__init__()
        self.most, self.other = most, other
        self._batches: dict[str, list[PairedBatch]] = {}

    @property
    def data(self) -> States:
        """The data module of the run."""
        return stream_of(self.trainer, States)

    def setup(self, stage: str) -> None:
        """Check that the rows fit in memory, and that there is one process; choose the splits to read."""
        if self.trainer.world_size > 1:
            raise UserError(
                f"The price of bijectivity is measured by one process, but `trainer.devices` makes "
                f"{self.trainer.world_size}. Set it to 1."
            )
        self.data.plan(Plan(other=self.other))
        reader = self.data.reader
        _check_room(self.most, len(reader.sites), sum(reader.widths), self.trainer.strategy.root_device)

    def test_step(self, batch: PairedBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Keep the rows of a batch."""
        kept = self._batches.setdefault(self.data.splits[dataloader_idx], [])
        if sum(batch.x.shape[1] for batch in kept) < self.most:
            kept.append(batch)

    def on_test_epoch_end(self) -> None:
        """Check the states of the last batch as well, and join what was kept."""
        self.data.reader.check.flush()
        self.rows = {split: PairedRows.of(batches, self.most) for split, batches in self._batches.items()}
        self._batches = {}


def _check_room(rows: int, sites: int, widths: int, device: torch.device) -> None:
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
        raise UserError(
            f"Expected `most_rows` rows at {sites} site pairs to fit in half of the free memory, "
            f"{in_words(free / 2)}, but {rows:,} take {in_words(size)}. Give fewer, or fewer `data.sites`."
        )
