"""What does `INN(recompute=True)` save and cost? A step of the default network both ways, with it and without.

Bytes are those that autograd keeps for the backward pass, parameters apart, and what a coupling makes on the way back
at most, as it is computed again; all of them grow with the number of rows and of sites. Seconds are of processors where
the device is a CPU.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.maps.inn import INN
from benchmarks.harness import Figures, interleaved, parser, ratio

MIB = 2**20


def network(width: int, *, recompute: bool, device: str) -> INN:
    """The default network, away from its start."""
    torch.manual_seed(0)
    aligner = INN(1, width, width, recompute=recompute).to(device)
    for parameter in aligner.parameters():
        torch.nn.init.normal_(parameter, std=0.01)
    return aligner


@contextmanager
def kept_by(aligner: INN) -> Iterator[dict[int, int]]:
    """Within it, what autograd keeps, parameters apart: place in memory -> bytes."""
    own = {parameter.untyped_storage().data_ptr() for parameter in aligner.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no place is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def bytes_of_a_step(aligner: INN, x: Tensor, y: Tensor) -> int:
    """Bytes that a step keeps at once, parameters apart."""
    with kept_by(aligner) as kept:
        loss = aligner.loss(x, y).sum()
    total = sum(kept.values())
    if aligner.recompute:
        halves = x.split(aligner.widths, -1)
        with kept_by(aligner) as again:
            aligner._couple(0, (halves[0], halves[1]))
        total += sum(again.values())
    del loss
    return total


def step(aligner: INN, x: Tensor, y: Tensor) -> None:
    """A step, without the optimiser."""
    aligner.zero_grad()
    aligner.loss(x, y).sum().backward()


def measure(figures: Figures, width: int, rows: int, rounds: int, device: str) -> None:
    """All figures at a width."""
    x, y = torch.randn(2, 1, rows, width, device=device)
    work = {}
    kept = {}
    for name, recompute in {"kept": False, "recomputed": True}.items():
        aligner = network(width, recompute=recompute, device=device)
        kept[name] = bytes_of_a_step(aligner, x, y)
        label = f"d = {width}, {rows} rows, {name}"
        figures.add(f"{label}: MiB", kept[name] / MIB)
        work[label] = lambda aligner=aligner: step(aligner, x, y)
    clock = time.process_time if device == "cpu" else time.perf_counter
    seconds = interleaved(work, rounds=rounds, device=device, warmup=1, clock=clock)
    figures.add_times(seconds)
    plain, again = work
    figures.add(
        f"d = {width}: MiB, recomputed / kept", kept["recomputed"] / kept["kept"]
    )
    figures.add(
        f"d = {width}: seconds, recomputed / kept", ratio(seconds, again, plain)
    )


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--widths", type=int, nargs="*", default=[64, 768, 2048])
    arguments.add_argument("--rows", type=int, default=512)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    figures = Figures(options.device)
    for width in options.widths:
        measure(figures, width, options.rows, options.rounds, options.device)
    figures.write(options.json)


if __name__ == "__main__":
    main()
