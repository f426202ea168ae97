"""Reads the stored rows of many batches ahead of their use, with several threads, in the order of the files."""

import errno
import json
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from hashlib import blake2b
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

PIECE = 2**23  # bytes that a thread reads at a time
ROWS = 32_768  # rows of each model that are read together
SHARE = 1 / 16  # share of the free memory for each of two windows
THREADS = 4
StatesAtSites = tuple[StoredStates, tuple[int, ...]]  # and the sites to read, ascending


class TextSpan(NamedTuple):
    """A text whose rows are to be read.

    Attributes:
        text: its row number in the split.
        rows: memory for the bytes of its rows at each site.
    """

    text: int
    rows: list[np.ndarray]


def start_reading(
    pool: Executor,
    stored: Sequence[StatesAtSites],
    batches: Sequence[TextBatch],
    *,
    pinned: bool,
) -> list[Future]:
    """Give batches memory for their stored rows, and start reading; return the futures to wait for.

    Args:
        pool: threads that read.
        stored: stored states of each model.
        batches: batches on the CPU.
        pinned: whether the rows go to page-locked memory, from which they are copied to a GPU without waiting.
    """
    futures = []
    for states, sites in stored:
        spans: list[TextSpan] = []
        for batch in batches:
            spans += _attach(states, sites, batch, pinned)
        spans.sort(key=lambda span: span.text)
        for shard, piece in _pieces(states, spans):
            for place, site in enumerate(sites):
                futures.append(pool.submit(_read, states, site, place, shard, piece))
    return futures


def _attach(
    states: StoredStates, sites: tuple[int, ...], batch: TextBatch, pinned: bool
) -> list[TextSpan]:
    """Give a batch memory for its rows, and return where those of each text belong."""
    lengths = states.lengths[list(batch.text_numbers)]
    ends = (np.cumsum(lengths) * states.row_bytes).tolist()
    width = states.manifest.width
    rows = []
    memory = []
    # One by one: so the system need not clear that much memory for every batch.
    for _ in sites:
        of_site = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=pinned)
        rows.append(of_site.view(states.dtype).view(-1, width))
        memory.append(of_site.numpy())
    pooled = states.kind is not None
    batch.stored[states.model] = StoredRows(sites, rows, pooled)

    spans = []
    start = 0
    for text, end in zip(batch.text_numbers, ends, strict=True):
        own = [of_site[start:end] for of_site in memory]
        spans.append(TextSpan(text, own))
        start = end
    return spans


def _pieces(
    states: StoredStates, spans: Sequence[TextSpan]
) -> Iterator[tuple[int, list[TextSpan]]]:
    """Divide sorted spans into pieces of one shard, a few megabytes at each site."""
    piece: list[TextSpan] = []
    size = shard = 0
    for span in spans:
        own = bisect_right(states.manifest.bounds, span.text) - 1
        if piece and (own != shard or size >= PIECE):
            yield shard, piece
            piece = []
            size = 0
        shard = own
        piece.append(span)
        size += span.rows[0].nbytes
    if piece:
        yield shard, piece


def _read(
    states: StoredStates, site: int, place: int, number: int, spans: list[TextSpan]
) -> None:
    """Read the rows of some texts of one shard, and check the rows that were not read before.

    Raises:
        ValueError: the shard is damaged.
    """
    shard = states.shard(site, number)
    checked = states.checked(site)
    first = states.manifest.bounds[number]
    try:
        with shard.path.open("rb") as file:
            for span in spans:
                rows = span.rows[place]
                start = int(shard.starts[span.text - first])
                file.seek(shard.first + start * states.row_bytes)
                if file.readinto(rows.data) != rows.nbytes:
                    raise OSError(errno.EIO, "it is cut short")
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        raise UserError(damaged(shard.path, what)) from error
    for span in spans:
        if not checked[span.text]:
            shard.check(span.text - first, span.rows[place].data)
            checked[span.text] = True


class StoredLoader(DataLoader):
    """Loads batches of texts in the order of its sampler, together with the models' stored states of them.

    The batches of a window are read together, sorted by their places in the files, while those of the window before are
    used. A window has `ROWS` rows, or as many as fit in a share of the free memory. Its size does not change the
    batches.

    Args:
        data: the texts.
        stored: stored states of each model that has any.
        options: options of `DataLoader`.
    """

    def __init__(
        self, data: TokenisedTexts, stored: Sequence[StatesAtSites], **options: Any
    ) -> None:
        super().__init__(data, **options)
        self.stored = list(stored)

    def beside(self, kind: str, about: Mapping[str, Any]) -> Path:
        """Return where to keep the result of a pass over this loader, beside the stores.

        Args:
            kind: kind of result.
            about: what decides it, besides the states, their order and their rows, as plain values.
        """
        data = cast(TokenisedTexts, self.dataset)
        order = cast(LengthBatches, self.sampler)
        sources = [(states.source, sites) for states, sites in self.stored]
        content = json.dumps(about, sort_keys=True, default=str)
        digest = blake2b(content.encode(), digest_size=12)
        digest.update(repr(sources).encode())
        digest.update(repr((order.described(), data.leave_out)).encode())
        for rows, marks in data.marks.items():
            digest.update(str(rows).encode() + marks.flat.numpy().tobytes())
        states, _ = self.stored[0]
        return states.folder.parent / kind / digest.hexdigest()

    def __iter__(self) -> Any:
        """Yield the batches of an epoch."""
        batches = super().__iter__()
        reading: deque[tuple[list[TextBatch], list[Future]]] = deque()
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="store")
        try:
            for window in self._windows(batches):
                pinned = self.pin_memory
                futures = start_reading(pool, self.stored, window, pinned=pinned)
                reading.append((window, futures))
                if len(reading) > 1:
                    yield from _finished(*reading.popleft())
            while reading:
                yield from _finished(*reading.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    def _windows(self, batches: Iterator[TextBatch]) -> Iterator[list[TextBatch]]:
        """Yield the batches to read together: so many rows of each model, exceeded by less than a batch."""
        row_bytes = 0  # of all models at all sites
        for states, sites in self.stored:
            row_bytes += len(sites) * states.row_bytes
        fitting = int(SHARE * free_memory(torch.device("cpu")) / row_bytes)
        most = min(ROWS, fitting)
        lengths = self.stored[0][0].lengths
        window: list[TextBatch] = []
        rows = 0
        for batch in batches:
            window.append(batch)
            rows += int(lengths[list(batch.text_numbers)].sum())
            if rows >= most:
                yield window
                window = []
                rows = 0
        if window:
            yield window


def _finished(
    window: list[TextBatch], futures: Sequence[Future]
) -> Iterator[TextBatch]:
    """Yield the batches of a window once they are read, dropping each when the next is requested."""
    for future in futures:
        future.result()
    window.reverse()
    while window:
        yield window.pop()
