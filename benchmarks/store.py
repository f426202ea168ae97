"""Epochs from a store of states against running the models again, and the rate of reading against plain `pread`.

Two BERTs of 12 blocks and width 768 with random weights read the embedded sentences; an epoch yields the paired rows of
all 13 sites in the shuffled order of training. Without a store both models run for every batch, in float32. With one,
the states come from files, stored as float32 and as bfloat16.

The page cache of the files is dropped by `posix_fadvise` before every epoch and every plain reading, so that they all
come from the disk. Loading is what the loader does, batches with their stored rows; an epoch also gathers x and y.
Plain reading is `pread` of the same files from beginning to end, 8 MB at a time as the loader's threads do, into memory
as large as the files that, like the loader's, was used before. They run in turns, each round beginning with another.
The first epoch, which compares every text's checksum and uses memory for the first time, is stated by itself, and what
no other process can change stands beside the seconds: processor seconds, page faults, bytes asked of the system.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from transformers import BertModel, PreTrainedTokenizerBase

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.pairings import pair_states
from aligners.datamodules.store import read_ahead
from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.sources import TextSource
from aligners.models.tokenizers import word_pieces
from benchmarks.harness import Figures, parser, ratio
from benchmarks.parts import bert_config

IO = Path("/proc/self/io")
BUFFER = read_ahead.PIECE
SMALL = 2_048  # rows: a few batches, as where many models are read with little memory


def model_folder(
    folder: Path, tokenizer: PreTrainedTokenizerBase, seed: int, layers: int, width: int
) -> str:
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


def plainly(folder: Path, memory: bytearray) -> None:
    """Read the files from beginning to end."""
    place, into = 0, memoryview(memory)
    for path in shards(folder):
        file, offset = os.open(path, os.O_RDONLY), 0
        while count := os.preadv(file, [into[place : place + BUFFER]], offset):
            place, offset = place + count, offset + count
        os.close(file)


def epoch(data: PairedActivations) -> None:
    """All paired rows of the fitting texts, in a shuffled order."""
    for batch in data.paired("fit", shuffle=True):
        del batch


def loading(data: PairedActivations) -> None:
    """The batches of texts with their stored rows."""
    for texts in data.loader("fit", shuffle=True):
        del texts


class Used(NamedTuple):
    """What some work took.

    Attributes:
        seconds: on the clock.
        cpu: seconds of all threads on processors, those in the system included.
        faults: pages that the system had to find or clear.
        read: bytes that were asked of it.
    """

    seconds: float
    cpu: float
    faults: float
    read: float

    @classmethod
    def now(cls) -> Self:
        """Since the process began."""
        asked = next(
            int(line.split()[1])
            for line in IO.read_text().splitlines()
            if line.startswith("rchar")
        )
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        return cls(time.perf_counter(), time.process_time(), faults, asked)


def used_by(work: Callable[[], object]) -> Used:
    """What some work takes."""
    before = Used.now()
    work()
    return Used(*(b - a for a, b in zip(before, Used.now(), strict=True)))


def cold(folder: Path, work: Callable[[], object]) -> Callable[[], Used]:
    """Drop the page cache, then work; what the work alone takes."""

    def run() -> Used:
        drop_page_cache(folder)
        return used_by(work)

    return run


def rounding(exact: PairedActivations, rounded: PairedActivations) -> float:
    """Share of the variance of X's states that is lost by rounding, at the site that loses most, on 100 texts."""
    x, y = (
        torch.cat([batch.x.double() for batch in data.paired("fit", only=100)], 1)
        for data in (exact, rounded)
    )
    lost = (x - y).square().sum((1, 2)) / (x - x.mean(1, keepdim=True)).square().sum(
        (1, 2)
    )
    return float(lost.max())


def in_small_windows(data: PairedActivations, rows: int) -> None:
    """As `loading`, looking so many rows ahead."""
    before, read_ahead.ROWS = read_ahead.ROWS, rows
    try:
        loading(data)
    finally:
        read_ahead.ROWS = before


def measure(options: argparse.Namespace, folder: Path) -> Figures:
    """Write the stores, read them, and run the models, in turns."""
    source = TextSource(max_texts=options.texts)
    tokenizer = word_pieces(list(load_texts(source).fit["text"]), 1_536, 128)
    pair = [
        model_folder(folder / str(n), tokenizer, n, options.layers, options.width)
        for n in (0, 1)
    ]

    def module(**given: Any) -> PairedActivations:
        own = {"text": source, "batch_size": options.batch, "held_out_types": 0.0}
        return pair_states(pair[0], pair[1], **own, **given)

    figures, plain = Figures("cpu"), module()
    stored: dict[str, PairedActivations] = {}
    figures.add(
        "processes that others run at the start (load average)", os.getloadavg()[0]
    )
    work: dict[str, Callable[[], Used]] = {}
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        place = folder / dtype
        data = stored[dtype] = module(store=place, store_dtype=dtype)
        figures.add(
            f"writing {dtype}, seconds", used_by(partial(data.loader, "fit")).seconds
        )
        figures.add(
            f"first epoch of {dtype}, checked, seconds",
            cold(place, partial(epoch, data))().seconds,
        )
        sizes[dtype] = sum(path.stat().st_size for path in shards(place))
        memory = bytearray(sizes[dtype])
        work[f"epoch, {dtype}"] = cold(place, partial(epoch, data))
        work[f"loading, {dtype}"] = cold(place, partial(loading, data))
        work[f"loading in small windows, {dtype}"] = cold(
            place, partial(in_small_windows, data, SMALL)
        )
        work[f"pread, {dtype}"] = cold(place, partial(plainly, place, memory))
    models = [used_by(partial(epoch, plain))]
    used = in_turns(work, options.rounds)
    models.append(used_by(partial(epoch, plain)))
    figures.add("variance lost by rounding to bfloat16", rounding(*stored.values()))
    figures.add("rows of an epoch", int(plain.split("fit").lengths_of(0).sum()))
    seconds = {name: [each.seconds for each in rounds] for name, rounds in used.items()}
    figures.add_times(
        {
            "models, before and after all else": [each.seconds for each in models],
            **seconds,
        }
    )
    for dtype, bar in (("float32", 5.0), ("bfloat16", 10.0)):
        slower = statistics.mean(each.seconds for each in models) / statistics.median(
            seconds[f"epoch, {dtype}"]
        )
        figures.add(f"models / epoch of {dtype}", slower, bar=bar, sense=">=")
        add_rates(figures, dtype, seconds, sizes[dtype])
        add_counters(figures, dtype, used, sizes[dtype] / 1e9)
    return figures


def in_turns(
    work: Mapping[str, Callable[[], Used]], rounds: int
) -> dict[str, list[Used]]:
    """What each alternative takes in each round; nothing is counted of a first round, in which memory is first used."""
    for run in work.values():
        run()
    used: dict[str, list[Used]] = {name: [] for name in work}
    for i in range(rounds):
        for name in [*work][i % len(work) :] + [*work][: i % len(work)]:
            used[name].append(work[name]())
    return used


def add_rates(
    figures: Figures, dtype: str, seconds: Mapping[str, list[float]], size: int
) -> None:
    """Bytes a second against those of plain reading, and the bar."""
    figures.add(f"size of {dtype}, GB", size / 1e9)
    figures.add(
        f"pread of {dtype}, GB/s",
        size / 1e9 / statistics.median(seconds[f"pread, {dtype}"]),
    )
    read = ratio(seconds, f"pread, {dtype}", f"loading, {dtype}")
    figures.add(f"rate of loading / pread, {dtype}", read, bar=0.8, sense=">=")
    read = ratio(seconds, f"pread, {dtype}", f"loading in small windows, {dtype}")
    figures.add(f"rate of loading in small windows / pread, {dtype}", read)


def add_counters(
    figures: Figures, dtype: str, used: Mapping[str, list[Used]], gigabytes: float
) -> None:
    """What does not depend on other processes, for each GB of the files."""
    for name in ("pread", "loading", "loading in small windows"):
        rounds = used[f"{name}, {dtype}"]
        each = {
            "processor seconds": [one.cpu for one in rounds],
            "page faults": [one.faults for one in rounds],
            "GB asked of the system": [one.read / 1e9 for one in rounds],
        }
        for what, values in each.items():
            figures.add(
                f"{name}, {dtype}: {what} a GB", statistics.median(values) / gigabytes
            )


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=7)
    for name, size in {"width": 768, "layers": 12, "texts": 600, "batch": 32}.items():
        arguments.add_argument(f"--{name}", type=int, default=size)
    arguments.add_argument(
        "--folder",
        type=Path,
        help="where the store is written; default: a temporary folder",
    )
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = measure(options, Path(folder))
    figures.write(options.json)


if __name__ == "__main__":
    main()
