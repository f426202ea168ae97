"""A loader whose batches of texts come with stored states, read ahead of their use."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from aligners.files.room import free_memory
from datamodules.batches import LengthBatches, TextBatch
from datamodules.store.reading import Rings, start_reading
from datamodules.store.states import StoredStates
from datamodules.tokens.tokenised import TokenisedTexts

ROWS = 32_768  # of each model, that are read together
SHARE = 1 / 16  # of the free memory, which they may take; two windows are there at once
BESIDE = 4  # largest batches for which there is memory beside these: those in use, and ends of windows and of the ring
THREADS = 4


class StoredLoader(DataLoader):
    """Loads batches of texts in the order of its sampler, with the states that models have of them in a store.

    The batches of a window are read together, sorted by their places in the files, while those of the window before
    are used. A window has `ROWS` rows, or as many as fit in a share of the free memory: which rows are in a batch does
    not depend on it.

    Args:
        data: the texts.
        stored: the states of each model that has some, and the sites to read, ascending.
        rings: memory for the rows, which loaders of one run share; default: this loader's own.
        options: of `DataLoader`.
    """

    def __init__(
        self,
        data: TokenisedTexts,
        stored: Sequence[tuple[StoredStates, tuple[int, ...]]],
        rings: Rings | None = None,
        **options: Any,
    ) -> None:
        super().__init__(data, **options)
        self.stored, self._rings = list(stored), rings or Rings()

    def beside(self, kind: str, about: Mapping[str, Any]) -> Path:
        """Where to keep what a pass over this loader gives, beside the stores.

        Args:
            kind: of what is kept.
            about: what decides it besides the states, their order and their rows, as plain values.
        """
        data, order = cast(TokenisedTexts, self.dataset), cast(LengthBatches, self.sampler)
        digest = blake2b(json.dumps(about, sort_keys=True, default=str).encode(), digest_size=12)
        digest.update(repr([(states.folder.name, sites) for states, sites in self.stored]).encode())
        digest.update(repr((order.described(), data.leave_out)).encode())
        for rows, marks in data.marks.items():
            digest.update(str(rows).encode() + marks.flat.numpy().tobytes())
        return self.stored[0][0].folder.parent / kind / digest.hexdigest()

    def __iter__(self) -> Any:
        """The batches of an epoch."""
        return self._with_states(super().__iter__())

    def _with_states(self, batches: Iterator[TextBatch]) -> Iterator[TextBatch]:
        most = self._most_rows()
        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(THREADS, thread_name_prefix="store"))
            stack.callback(pool.shutdown, cancel_futures=True)
            ring = None if self.pin_memory else stack.enter_context(self._rings.lent(self._room(most)))
            reading: deque[tuple[list[TextBatch], list[Future]]] = deque()
            for window in self._windows(batches, most):
                reading.append((window, start_reading(pool, self.stored, window, ring)))
                if len(reading) > 1:
                    yield from _finished(*reading.popleft())
            while reading:
                yield from _finished(*reading.popleft())

    def _row_bytes(self) -> int:
        """Bytes of a row of all models at all sites."""
        return sum(len(sites) * states.row_bytes for states, sites in self.stored)

    def _most_rows(self) -> int:
        """Rows of each model in a window, at most a batch more."""
        return min(ROWS, int(SHARE * free_memory(torch.device("cpu")) / self._row_bytes()))

    def _room(self, most: int) -> int:
        """Bytes for two windows of so many rows, and what is there beside them."""
        lengths, batches = np.sort(self.stored[0][0].lengths), cast(LengthBatches, self.sampler)
        largest = int(lengths[-int(np.diff(batches.bounds).max()) :].sum())
        return min(2 * most + BESIDE * largest, int(lengths.sum()) + largest) * self._row_bytes()

    def _windows(self, batches: Iterator[TextBatch], most: int) -> Iterator[list[TextBatch]]:
        """The batches that are read together."""
        lengths, window, rows = self.stored[0][0].lengths, [], 0
        for batch in batches:
            window.append(batch)
            rows += int(lengths[list(batch.places)].sum())
            if rows >= most:
                yield window
                window, rows = [], 0
        if window:
            yield window


def _finished(window: list[TextBatch], futures: Sequence[Future]) -> Iterator[TextBatch]:
    """The batches of a window once they are read, each let go of when the next is asked for."""
    for future in futures:
        future.result()
    window.reverse()
    while window:
        yield window.pop()
