"""Reads the stored rows of many batches at once, ahead of their use: sorted by place in the files, by threads."""

import errno
import json
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import blake2b
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from aligners.datamodules.batches import LengthBatches, StoredRows, TextBatch
from aligners.datamodules.store.shards import damaged
from aligners.datamodules.store.stored_states import StoredStates
from aligners.datamodules.tokens.tokenised import TokenisedTexts
from aligners.errors import UserError
from aligners.files.resources import free_memory

ALIGNED = 64
PIECE = 2**23  # bytes that a thread reads before it takes the next piece
ROWS = 32_768  # of each model, that are read together
SHARE = 1 / 16  # of the free memory, which they may take; two windows are there at once
BESIDE = 4  # largest batches for which there is memory beside these: those in use, and ends of windows and of the ring
THREADS = 4
StatesAtSites = tuple[StoredStates, tuple[int, ...]]  # and the sites to read, ascending


class Ring:
    """Memory that is given out in turn, from its beginning again once nobody holds what was given out there.

    What does not fit meanwhile gets memory of its own.

    Args:
        size: bytes; they are taken from the system as they are used.

    Attributes:
        fresh: bytes that did not fit.
    """

    def __init__(self, size: int) -> None:
        self.size, self.fresh = size, 0
        self._memory = torch.empty(size, dtype=torch.uint8).numpy()
        self._given: deque[tuple[int, weakref.ref[np.ndarray]]] = (
            deque()
        )  # first byte and array, in their order
        self._next = 0

    def take(self, size: int) -> np.ndarray:
        """Bytes, (size,) uint8, that are used again when the array and all that share its memory are gone."""
        while self._given and self._given[0][1]() is None:
            self._given.popleft()
        start = self._place(size)
        if start is None:
            self.fresh += size
            return torch.empty(size, dtype=torch.uint8).numpy()
        array = self._memory[start : start + size]
        self._given.append((start, weakref.ref(array)))
        self._next = start + size + -size % ALIGNED
        return array

    def _place(self, size: int) -> int | None:
        """Where so many bytes are free, or None."""
        if not self._given:
            return 0 if size <= self.size else None
        oldest = self._given[0][0]
        if self._next > oldest and self._next + size <= self.size:
            return self._next
        start = 0 if self._next > oldest else self._next
        return start if start + size <= oldest else None


class TextSpan(NamedTuple):
    """Where the rows of a text belong.

    Attributes:
        text: its row number in the split.
        into: bytes of the batch's rows, (S, P · bytes of a row) uint8.
        start: first byte of the text's rows at each site.
        end: the byte after them.
    """

    text: int
    into: np.ndarray
    start: int
    end: int


def start_reading(
    pool: Executor, stored: Sequence[StatesAtSites], batches: Sequence[TextBatch], ring: Ring | None
) -> list[Future]:
    """Give batches their stored rows, which are there once all of the futures are done.

    Args:
        pool: threads that read.
        stored: of each model.
        batches: on the CPU.
        ring: memory for the rows; None: page-locked memory, which torch itself uses again once it has been copied.
    """
    parts: list[list[TextSpan]] = [[] for _ in stored]
    for batch in batches:  # in the order in which they are let go of
        for (states, sites), of_model in zip(stored, parts, strict=True):
            of_model += _attach(states, sites, batch, ring)
    futures = []
    for (states, sites), of_model in zip(stored, parts, strict=True):
        for shard, piece in _pieces(states, sorted(of_model, key=lambda part: part.text)):
            futures += [
                pool.submit(_read, states, site, s, shard, list(piece))
                for s, site in enumerate(sites)
            ]
    return futures


def _attach(
    states: StoredStates, sites: tuple[int, ...], batch: TextBatch, ring: Ring | None
) -> Iterator[TextSpan]:
    """Give a batch memory for its rows, and say where those of each text belong."""
    ends = np.cumsum(states.lengths[list(batch.text_numbers)]) * states.row_bytes
    shape = (len(sites), int(ends[-1]))
    if ring is None:
        memory = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
    else:
        memory = torch.from_numpy(ring.take(shape[0] * shape[1])).view(shape)
    rows = memory.view(states.dtype).unflatten(1, (-1, states.manifest.width))
    batch.stored[states.model] = StoredRows(sites, rows, states.kind is not None)
    into, start = memory.numpy(), 0
    for text, end in zip(batch.text_numbers, ends.tolist(), strict=True):
        yield TextSpan(text, into, start, end)
        start = end


def _pieces(
    states: StoredStates, parts: Sequence[TextSpan]
) -> Iterator[tuple[int, list[TextSpan]]]:
    """Divide sorted parts into pieces of one shard and of a few megabytes at each site."""
    shards = (
        np.searchsorted(states.manifest.bounds, [part.text for part in parts], side="right") - 1
    )
    pieces = np.cumsum([part.end - part.start for part in parts]) // PIECE
    placed = zip(shards.tolist(), pieces.tolist(), parts, strict=True)
    for (shard, _), piece in groupby(placed, key=itemgetter(0, 1)):
        yield shard, [part for _, _, part in piece]


def _read(states: StoredStates, site: int, place: int, number: int, parts: list[TextSpan]) -> None:
    """Read the rows of some texts of one shard, and check those that were not read before.

    `parts` is emptied: a thread lets go of its arguments some time after its future is done, and the memory in them may
    be used again before.

    Raises:
        ValueError: the shard is damaged.
    """
    shard = states.shard(site, number)
    texts = np.array([part.text for part in parts]) - states.manifest.bounds[number]
    buffers = [part.into[place, part.start : part.end].data for part in parts]
    parts.clear()
    starts = shard.starts[texts] * states.row_bytes + shard.first
    try:
        with shard.path.open("rb") as file:
            for start, buffer in zip(starts.tolist(), buffers, strict=True):
                file.seek(start)
                if file.readinto(buffer) != len(buffer):
                    raise OSError(errno.EIO, "it is cut short")
    except OSError as error:
        raise UserError(damaged(shard.path, f"cannot be read ({error.strerror})")) from error
    checked = states.checked(site)
    places = texts + states.manifest.bounds[number]
    for i in np.flatnonzero(~checked[places]).tolist():
        shard.check(int(texts[i]), buffers[i])
    checked[places] = True


class StoredLoader(DataLoader):
    """Loads batches of texts in the order of its sampler, with the states that models have of them in a store.

    The batches of a window are read together, sorted by their places in the files, while those of the window before
    are used. A window has `ROWS` rows, or as many as fit in a share of the free memory: which rows are in a batch does
    not depend on it.

    Args:
        data: the texts.
        stored: of each model that has some.
        rings: memory for the rows, which loaders of one run share.
        options: of `DataLoader`.
    """

    def __init__(
        self,
        data: TokenisedTexts,
        stored: Sequence[StatesAtSites],
        rings: list[Ring],
        **options: Any,
    ) -> None:
        super().__init__(data, **options)
        self.stored, self._rings = list(stored), rings

    def beside(self, kind: str, about: Mapping[str, Any]) -> Path:
        """Where to keep what a pass over this loader gives, beside the stores.

        Args:
            kind: of what is kept.
            about: what decides it besides the states, their order and their rows, as plain values.
        """
        data, order = cast(TokenisedTexts, self.dataset), cast(LengthBatches, self.sampler)
        digest = blake2b(json.dumps(about, sort_keys=True, default=str).encode(), digest_size=12)
        digest.update(repr([(states.source, sites) for states, sites in self.stored]).encode())
        digest.update(repr((order.described(), data.leave_out)).encode())
        for rows, marks in data.marks.items():
            digest.update(str(rows).encode() + marks.flat.numpy().tobytes())
        return self.stored[0][0].folder.parent / kind / digest.hexdigest()

    def __iter__(self) -> Any:
        """The batches of an epoch."""
        row = sum(
            len(sites) * states.row_bytes for states, sites in self.stored
        )  # bytes, of all models at all sites
        most, batches = (
            min(ROWS, int(SHARE * free_memory(torch.device("cpu")) / row)),
            super().__iter__(),
        )
        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(THREADS, thread_name_prefix="store"))
            stack.callback(pool.shutdown, cancel_futures=True)
            ring = None if self.pin_memory else self._ring(row * self._room(most))
            if ring is not None:
                stack.callback(self._rings.append, ring)
            reading: deque[tuple[list[TextBatch], list[Future]]] = deque()
            for window in self._windows(batches, most):
                reading.append((window, start_reading(pool, self.stored, window, ring)))
                if len(reading) > 1:
                    yield from _finished(*reading.popleft())
            while reading:
                yield from _finished(*reading.popleft())

    def _ring(self, size: int) -> Ring:
        """One of the rings, of at least so many bytes, which is not among them until it is given back."""
        ring = self._rings.pop() if self._rings else None
        return ring if ring is not None and ring.size >= size else Ring(size)

    def _room(self, most: int) -> int:
        """Rows for which there is memory: two windows of so many, and what is there beside them."""
        lengths, batches = np.sort(self.stored[0][0].lengths), cast(LengthBatches, self.sampler)
        largest = int(lengths[-int(np.diff(batches.bounds).max()) :].sum())
        return min(2 * most + BESIDE * largest, int(lengths.sum()) + largest)

    def _windows(self, batches: Iterator[TextBatch], most: int) -> Iterator[list[TextBatch]]:
        """The batches that are read together: of so many rows of each model, at most a batch more."""
        lengths, window, rows = self.stored[0][0].lengths, [], 0
        for batch in batches:
            window.append(batch)
            rows += int(lengths[list(batch.text_numbers)].sum())
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
