"""Everything that has a figure for GPUs, in at most 6 minutes on one of them: `python -m benchmarks.on_gpu`.

Models have random weights and texts random tokens: nothing is downloaded. Each part is described in its module. One
that fails or takes too long does not hide the others: its error is in the JSON, which is written anew after every part,
so that a run that is cut off leaves what it had. A part for which too little time is left is not begun. The exit status
is 1 if a part failed or a figure missed its bar.

It runs from a bare checkout, without `datasets`, jsonargparse or W&B, which `commands` alone needs. The parts that use
Lightning are skipped where it is not installed; torch_cka and flash_attn are compared with if they are. Bring what is
missing to a machine without a network as wheels: `pip download --no-deps --only-binary=:all: --python-version 3.12
--dest wheels lightning==2.6.6 torch_cka==0.21` on another, and there `pip install --no-index --no-deps wheels/*.whl`.

`--small` runs all parts at sizes that a CPU does in seconds, at which times mean nothing: bars do not count then.
"""

import argparse
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.harness import Figures, machine, write_whole
from benchmarks.on_gpu.device import Device, Skipped

RESULTS = Path(__file__).parents[1] / "results"
TAIL = 8  # last entries of a traceback that are kept


class Part(NamedTuple):
    """A module of this folder, with a function `run(figures, device, small)`.

    Attributes:
        seconds: that it is expected to take on a GPU; it is stopped after twice as many.
        needs: packages without which it is skipped.
    """

    seconds: float
    needs: tuple[str, ...] = ()


COMMANDS = ("lightning", "jsonargparse", "datasets", "wandb", "scipy", "matplotlib")
# Those first that say most.
PARTS = {
    "bank": Part(15),
    "steps": Part(50, ("lightning",)),
    "reading": Part(45),
    "agreement": Part(60, ("lightning", "scipy", "matplotlib")),
    "memory": Part(50, ("lightning",)),
    "solving": Part(60, ("lightning", "scipy")),
    "tf32": Part(70, ("lightning",)),
    "commands": Part(150, COMMANDS),
    "similarity": Part(60, ("lightning",)),
    "store": Part(75, ("lightning", "pyarrow", "filelock")),
    "attention": Part(30),
    "precision": Part(40),
    "ranks": Part(60, ("torchmetrics",)),
}
OTHER = ("torch_cka", "flash_attn")  # packages that are used where they are there


def main(given: list[str] | None = None) -> int:
    """Run the parts, and return the exit status."""
    options = parsed(given)
    device = Device(options.device)
    if options.threads or options.small:
        torch.set_num_threads(options.threads or 1)
    torch.set_float32_matmul_precision("highest")
    path = options.json
    if path is None and not options.small:
        path = (
            RESULTS
            / f"on_gpu-{re.sub('[^a-z0-9]+', '-', device.label.lower()).strip('-')}.json"
        )
    packages = [package for part in PARTS.values() for package in part.needs] + list(
        OTHER
    )
    missing = [
        package for package in dict.fromkeys(packages) if find_spec(package) is None
    ]
    print(
        f"{device.label}; torch {torch.__version__}; not installed: {', '.join(missing) or 'nothing that is used'}"
    )
    about = machine(options.device) | device.describe()
    record: dict[str, Any] = {"machine": about, "small": options.small, "parts": {}}
    began = time.monotonic()
    for name in options.parts:
        record["parts"][name] = {"status": "begun, and cut off"}
        if path is not None:
            write_whole(path, record)
        left = options.limit - (time.monotonic() - began)
        print(f"\n{name}")
        record["parts"][name] = run_part(name, device, options.small, left)
        if path is not None:
            write_whole(path, record)
    show(record["parts"])
    bad = [name for name, part in record["parts"].items() if part["status"] == "failed"]
    bad += [
        name
        for name, part in record["parts"].items()
        if part["missed"] and not options.small
    ]
    return 1 if bad else 0


def parsed(given: list[str] | None) -> argparse.Namespace:
    """The options."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "--parts",
        nargs="+",
        choices=list(PARTS),
        default=list(PARTS),
        help="default: all",
    )
    arguments.add_argument(
        "--small", action="store_true", help="sizes for a CPU; bars do not count"
    )
    arguments.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="default: benchmarks/results/on_gpu-DEVICE.json",
    )
    arguments.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    arguments.add_argument(
        "--threads",
        type=int,
        help="CPU threads of torch; default: all, but 1 with --small",
    )
    arguments.add_argument(
        "--limit", type=float, default=360.0, help="seconds for all parts"
    )
    options = arguments.parse_args(given)
    if not options.small and torch.device(options.device).type == "cpu":
        arguments.error("there is no GPU: --small runs all parts on a CPU")
    return options


def run_part(name: str, device: Device, small: bool, left: float) -> dict[str, Any]:
    """Run a part, whatever comes of it.

    Args:
        name: of the part.
        device: where.
        small: at which size.
        left: seconds until all has to be done.

    Returns:
        Its status, "done", "skipped" or "failed", why, its seconds, its figures, and which of them missed their bars.
    """
    part, figures = PARTS[name], Figures(device.name)
    outcome: dict[str, Any] = {
        "status": "done",
        "seconds": 0.0,
        "figures": figures.figures,
        "missed": figures.missed,
    }
    lacking = [package for package in part.needs if find_spec(package) is None]
    start = time.monotonic()
    try:
        if lacking:
            raise Skipped(f"it needs {', '.join(lacking)}")
        if left < part.seconds:
            raise Skipped(
                f"it takes some {part.seconds:.0f} s, and {left:.0f} are left"
            )
        with stopped_after(min(left, 2 * part.seconds)):
            import_module(f"benchmarks.on_gpu.{name}").run(figures, device, small)
            device.wait()  # an error that the device has not reported yet belongs to this part
    except Skipped as reason:
        outcome |= {"status": "skipped", "why": str(reason)}
        print(f"Skipped: {reason}.")
    except Exception as error:
        tail = traceback.format_exception(error, limit=-TAIL)
        print("".join(tail), flush=True)
        outcome |= {"status": "failed", "why": f"{type(error).__name__}: {error}"}
        outcome["error"] = {
            "type": type(error).__name__,
            "message": str(error),
            "traceback": tail,
        }
    outcome["seconds"] = round(time.monotonic() - start, 2)
    print(f"{name}: {outcome['status']} after {outcome['seconds']:.1f} s", flush=True)
    try:
        device.clear()
    except Exception as error:  # a device that has failed fails here again
        print(f"Its memory cannot be cleared: {error}")
    return outcome


@contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """Raise in the work within it once so many seconds have passed, as soon as Python gets a word in."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def show(parts: dict[str, dict[str, Any]]) -> None:
    """Print the table: every part, what came of it, its seconds, its figures, and those that missed their bars."""
    print(f"\n{'part':<12}{'status':<10}{'seconds':>8}{'figures':>9}{'missed':>8}")
    for name, part in parts.items():
        counts = f"{len(part['figures']):>9}{len(part['missed']):>8}"
        print(
            f"{name:<12}{part['status']:<10}{part['seconds']:>8.1f}{counts}  {part.get('why', '')}".rstrip()
        )
        for missed in part["missed"]:
            figure = part["figures"][missed]
            print(
                f"    {missed}: {figure['value']:.4g}, expected {figure['sense']} {figure['bar']:g}"
            )


if __name__ == "__main__":
    sys.exit(main())
