"""From a store of states to the device, as a loader brings them, against the slower of plain reading and copying.

States of a BERT of width 768 and 4 blocks at all 5 sites, float32, about 2 GB. Cold: the page cache of the files is
dropped before every pass (at least .8 of the slower of `pread` and a copy from page-locked memory). Warm: the files lie
in the page cache. Every text's checksum was compared in the pass before.
"""

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import pyarrow
import torch

from aligners.datamodules.batches import LengthBatches
from aligners.datamodules.store.read_ahead import StoredLoader
from aligners.datamodules.store.stored_states import StoredStates
from aligners.datamodules.store.stores import write_missing
from aligners.datamodules.tokens.tokenised import TokenisedTexts
from benchmarks.activations import texts
from benchmarks.harness import Figures
from benchmarks.on_gpu.device import Device
from benchmarks.on_gpu.models import made
from benchmarks.store import drop_page_cache, plainly, shards

TOKENIZER = SimpleNamespace(pad_token_id=0, pad_token_type_id=0, padding_side="right")


class Tokens:
    """Random texts as `tokenise` gives them, without the package `datasets`.

    Args:
        count: texts.
        longest: tokens of a text.
    """

    def __init__(self, count: int, longest: int) -> None:
        ids = [text.tolist() for text in texts(count, longest)]
        special, lengths = (
            [[0] * len(text) for text in ids],
            [len(text) for text in ids],
        )
        columns = {
            "input_ids": ids,
            "special_tokens_mask": special,
            "length": lengths,
            "id": list(range(count)),
        }
        self._table = pyarrow.table(columns)
        self.column_names = self._table.column_names

    def __getitem__(self, key: str | slice) -> Any:
        return (
            self._table
            if isinstance(key, slice)
            else self._table.column(key).to_pylist()
        )

    def with_format(self, _: str) -> Self:
        """The same, whose rows are an Arrow table."""
        return self


def run(figures: Figures, device: Device, small: bool) -> None:
    """Run the part."""
    count, size, layers = (8, 4, 2) if small else (5_000, 64, 4)
    model = made("BERT", small, device.name, layers=layers)
    data = TokenisedTexts([cast(Any, Tokens(count, 128))], [cast(Any, TOKENIZER)])
    with tempfile.TemporaryDirectory() as folder:
        states, sites = (
            StoredStates(Path(folder), model, data, 0, "residual", "float32"),
            tuple(range(layers + 1)),
        )
        figures.add(
            "writing, seconds", device.seconds(lambda: write_missing(states, sites))
        )
        order = LengthBatches(data.lengths.numpy(), size, shuffle=True)
        options = {"sampler": order, "batch_size": None, "pin_memory": device.gpu}
        loader = StoredLoader(data, [(states, sites)], **options)
        rates(figures, device, loader, states.folder, small)


def rates(
    figures: Figures, device: Device, loader: StoredLoader, folder: Path, small: bool
) -> None:
    """GB/s of the loader, of plain reading and of copying."""
    size = sum(path.stat().st_size for path in shards(folder))
    gigabytes, memory, piece = size / 1e9, bytearray(size), 2**16 if small else 2**28
    pinned, there = (
        torch.zeros(piece, dtype=torch.uint8, pin_memory=device.gpu),
        torch.zeros(piece, dtype=torch.uint8, device=device.name),
    )

    def load() -> None:
        for batch in loader:
            batch.to(device.name, non_blocking=device.gpu)

    def median(work: Callable[[], object], rounds: int, *, cold: bool = False) -> float:
        seconds = []
        for _ in range(rounds):
            if cold:
                drop_page_cache(folder)
            seconds.append(device.seconds(work))
        return statistics.median(seconds)

    figures.add("size, GB", gigabytes)
    figures.add("first pass, checked, GB/s", gigabytes / median(load, 1))
    copy = piece / 1e9 / median(lambda: there.copy_(pinned, non_blocking=device.gpu), 7)
    figures.add("copy from page-locked memory, GB/s", copy)
    for state, cold, rounds in (("cold", True, 2), ("warm", False, 3)):
        plain = gigabytes / median(lambda: plainly(folder, memory), rounds, cold=cold)
        figures.add(f"pread, {state}, GB/s", plain)
        loaded = gigabytes / median(load, rounds, cold=cold)
        figures.add(f"store to device, {state}, GB/s", loaded)
        bar = 0.8 if cold else None
        figures.add(
            f"store to device, {state} / the slower of both",
            loaded / min(plain, copy),
            bar=bar,
            sense=">=",
        )
