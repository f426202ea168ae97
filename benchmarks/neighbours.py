"""What the measures of neighbourhoods take: the k nearest of all rows, exactly, then the three measures from them.

Each of `--rows` rows has a partner with noise in another space of the same width. Seconds are those of the process
(`CPU seconds`), which other work on the machine does not lengthen, and those of the clock. Memory is the most that the
process held beyond what it had before.

With `--compared` it is what `compare_arrays` takes for each default measure: the value, 99 permutations, and the
interval from leaving out a tenth of the rows in turn.
"""

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.api.compare_arrays import compare_arrays
from aligners.similarity.functional.neighbours import (
    jaccard,
    local_cka,
    mutual,
    neighbours_of,
    of_pairs,
)
from benchmarks.harness import Figures, parser

FORMULAS = {"mutual_knn": mutual, "jaccard_knn": jaccard, "cknna": local_cka}
COMPARED = ("unbiased_cka", "mutual_knn")


def arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    given = parser(__doc__)
    given.add_argument("--rows", type=int, default=100_000)
    given.add_argument("--width", type=int, default=64)
    given.add_argument("--compared", action="store_true", help="time `compare_arrays`")
    return given.parse_args()


def pair(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Rows (1, N, d), and the same turned, with as much noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=generator)
    turn, _ = torch.linalg.qr(torch.randn(width, width, generator=generator))
    noise = torch.randn(rows, width, generator=generator)
    return x[None], (x @ turn + noise)[None]


def most_held() -> float:
    """The most memory that this process has held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextmanager
def timed(figures: Figures, name: str) -> Iterator[None]:
    """Record the seconds of a block."""
    cpu = time.process_time()
    clock = time.perf_counter()
    yield
    figures.add(f"{name}, CPU seconds", time.process_time() - cpu)
    figures.add(f"{name}, seconds", time.perf_counter() - clock)


def measure(figures: Figures, x: Tensor, y: Tensor) -> None:
    """The neighbours of both sides, and the measures made of them."""
    with timed(figures, "neighbours of X"):
        of_x = neighbours_of(x, "x")
    with timed(figures, "neighbours of Y"):
        of_y = neighbours_of(y, "y")
    for name, formula in FORMULAS.items():
        with timed(figures, name):
            value = of_pairs(of_x, of_y, formula)
        figures.add(f"{name}, value", float(value))


def compare(figures: Figures, x: Tensor, y: Tensor) -> None:
    """The default measures of `compare_arrays`, one by one."""
    for name in COMPARED:
        with timed(figures, name):
            found = compare_arrays(x, y, name)
        (row,) = found.rows()
        for column in ("value", "low", "high", "p"):
            figures.add(f"{name}, {column}", row[column])


def main() -> None:
    """Measure them once: each is long enough for its seconds to be steady."""
    options = arguments()
    torch.set_num_threads(options.threads)
    figures = Figures(options.device)
    figures.add("rows", options.rows)
    figures.add("width", options.width)
    x, y = pair(options.rows, options.width)
    x = x.to(options.device)
    y = y.to(options.device)
    before = most_held()
    if options.compared:
        compare(figures, x[0], y[0])
    else:
        measure(figures, x, y)
    figures.add("most memory, MiB", most_held() - before)
    figures.write(options.json)


if __name__ == "__main__":
    main()
