"""A loader whose batches of texts come with stored states, read ahead of their use."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from datamodules.batches import LengthBatches, TextBatch
from datamodules.store.reading import start_reading
from datamodules.store.states import StoredStates
from datamodules.tokens.tokenised import TokenisedTexts
from storage.room import free_memory

__all__ = ["StoredLoader"]

ROWS = 32_768  # of each model, that are read together
SHARE = 1 / 16  # of the free memory, which they may take; two windows are there at once
THREADS = 4


class StoredLoader(DataLoader):
    """Loads batches of texts in the order of its sampler, with the states that models have of them in a store.

    The batches of a window are read together, sorted by their places in the files, while those of the window before
    are used. A window has `ROWS` rows, or as many as fit in a share of the free memory: which rows are in a batch does
    not depend on it.

    Args:
        data: the texts.
        stored: the states of each model that has some, and the sites to read, ascending.
        options: of `DataLoader`.
    """

    def __init__(
        self, data: TokenisedTexts, stored: Sequence[tuple[StoredStates, tuple[int, ...]]], **options: Any
    ) -> None:
        super().__init__(data, **options)
        self.stored = list(stored)

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
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="store")
        try:
            reading: deque[tuple[list[TextBatch], list[Future]]] = deque()
            for window in self._windows(batches):
                reading.append((window, start_reading(pool, self.stored, window, pin=self.pin_memory)))
                if len(reading) > 1:
                    yield from _finished(*reading.popleft())
            while reading:
                yield from _finished(*reading.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    def _windows(self, batches: Iterator[TextBatch]) -> Iterator[list[TextBatch]]:
        """The batches that are read together."""
        row = sum(len(sites) * states.row_bytes for states, sites in self.stored)
        most = min(ROWS, SHARE * free_memory(torch.device("cpu")) / row)
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
