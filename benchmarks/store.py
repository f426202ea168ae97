"""Epochs from a store of states against running the models again, and the rate of reading against plain `pread`.

Two BERTs of 12 blocks and width 768 with random weights read the embedded sentences; an epoch yields the paired rows of
all 13 sites in the shuffled order of training. Without a store both models run for every batch, in float32. With one,
the states come from files, stored as float32 and as bfloat16.

The page cache of the files is dropped by `posix_fadvise` before every epoch and every plain reading, so that they all
come from the disk. Plain reading is `pread` of the same files from beginning to end, 8 MB at a time, into one buffer.
Loading is what the loader does, batches with their stored rows; an epoch also gathers x and y. The first epoch, which
compares every text's checksum, is stated by itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import BertModel, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a bare checkout

from benchmarks.harness import Figures, parser, ratio
from benchmarks.parts import bert_config
from datamodules.paired import PairedActivations
from datamodules.store import loader
from datamodules.text.loading import load_texts
from datamodules.text.sources import TextSource
from frozen.embedded.tokenizers import word_pieces

BUFFER = 2**23
SMALL = 2_048  # rows: a few batches, as where many models are read with little memory


def model_folder(folder: Path, tokenizer: PreTrainedTokenizerBase, seed: int, layers: int, width: int) -> str:
    """A BERT of random weights."""
    torch.manual_seed(seed)
    BertModel(bert_config(len(tokenizer), layers, width)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def shards(folder: Path) -> list[Path]:
    """The files of rows."""
    return sorted(folder.rglob("*.safetensors"))


def drop_page_cache(folder: Path) -> None:
    """Have the system forget what it holds of the files."""
    for path in shards(folder):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def plainly(folder: Path) -> int:
    """Read the files from beginning to end; their bytes."""
    buffer, total = bytearray(BUFFER), 0
    for path in shards(folder):
        file, offset = os.open(path, os.O_RDONLY), 0
        while count := os.preadv(file, [buffer], offset):
            offset += count
        os.close(file)
        total += offset
    return total


def epoch(data: PairedActivations) -> None:
    """All paired rows of the fitting texts, in a shuffled order."""
    for batch in data.paired("fit", shuffle=True):
        del batch


def loading(data: PairedActivations) -> None:
    """The batches of texts with their stored rows."""
    for texts in data.loader("fit", shuffle=True):
        del texts


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of some work."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def cold(folder: Path, work: Callable[[], object]) -> Callable[[], float]:
    """Drop the page cache, then work; seconds of the work alone."""

    def run() -> float:
        drop_page_cache(folder)
        return seconds_of(work)

    return run


def rounding(exact: PairedActivations, rounded: PairedActivations) -> float:
    """Share of the variance of X's states that is lost by rounding, at the site that loses most, on 100 texts."""
    x, y = (torch.cat([batch.x.double() for batch in data.paired("fit", only=100)], 1) for data in (exact, rounded))
    lost = (x - y).square().sum((1, 2)) / (x - x.mean(1, keepdim=True)).square().sum((1, 2))
    return float(lost.max())


def in_small_windows(data: PairedActivations, rows: int) -> None:
    """As `loading`, looking so many rows ahead."""
    before, loader.ROWS = loader.ROWS, rows
    try:
        loading(data)
    finally:
        loader.ROWS = before


def measure(options: argparse.Namespace, folder: Path) -> Figures:
    """Write the stores, read them, and run the models, in turns."""
    source = TextSource(max_texts=options.texts)
    tokenizer = word_pieces(list(load_texts(source).fit["text"]), 1_536, 128)
    pair = [model_folder(folder / str(n), tokenizer, n, options.layers, options.width) for n in (0, 1)]

    def module(**given: Any) -> PairedActivations:
        own = {"text": source, "batch_size": options.batch, "held_out_types": 0.0}
        return PairedActivations(pair[0], pair[1], **own, **given)

    figures, plain = Figures("cpu"), module()
    stored: dict[str, PairedActivations] = {}
    figures.add("processes that others run at the start (load average)", os.getloadavg()[0])
    work: dict[str, Callable[[], float]] = {"models": lambda: seconds_of(lambda: epoch(plain))}
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        place = folder / dtype
        data = stored[dtype] = module(store=place, store_dtype=dtype)
        figures.add(f"writing {dtype}, seconds", seconds_of(partial(data.loader, "fit")))
        figures.add(f"first epoch of {dtype}, checked, seconds", cold(place, partial(epoch, data))())
        sizes[dtype] = sum(path.stat().st_size for path in shards(place))
        work[f"epoch, {dtype}"] = cold(place, partial(epoch, data))
        work[f"loading, {dtype}"] = cold(place, partial(loading, data))
        work[f"loading in small windows, {dtype}"] = cold(place, partial(in_small_windows, data, SMALL))
        work[f"pread, {dtype}"] = cold(place, partial(plainly, place))
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for i in range(options.rounds):
        for name in [*work][i % len(work) :] + [*work][: i % len(work)]:
            seconds[name].append(work[name]())
    figures.add("variance lost by rounding to bfloat16", rounding(*stored.values()))
    figures.add("rows of an epoch", int(plain.split("fit").lengths_of(0).sum()))
    figures.add_times(seconds)
    add_ratios(figures, seconds, sizes)
    return figures


def add_ratios(figures: Figures, seconds: Mapping[str, list[float]], sizes: Mapping[str, int]) -> None:
    """What the seconds of each alternative say, and the bars."""
    for dtype, bar in (("float32", 5.0), ("bfloat16", 10.0)):
        figures.add(f"size of {dtype}, GB", sizes[dtype] / 1e9)
        figures.add(f"pread of {dtype}, GB/s", sizes[dtype] / 1e9 / statistics.median(seconds[f"pread, {dtype}"]))
        figures.add(f"models / epoch of {dtype}", ratio(seconds, "models", f"epoch, {dtype}"), bar=bar, sense=">=")
        read = ratio(seconds, f"pread, {dtype}", f"loading, {dtype}")
        figures.add(f"rate of loading / pread, {dtype}", read, bar=0.8, sense=">=")
        read = ratio(seconds, f"pread, {dtype}", f"loading in small windows, {dtype}")
        figures.add(f"rate of loading in small windows / pread, {dtype}", read)


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=3)
    for name, size in {"width": 768, "layers": 12, "texts": 600, "batch": 32}.items():
        arguments.add_argument(f"--{name}", type=int, default=size)
    arguments.add_argument("--folder", type=Path, help="where the store is written; default: a temporary folder")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = measure(options, Path(folder))
    figures.write(options.json)


if __name__ == "__main__":
    main()
