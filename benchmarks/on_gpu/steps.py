"""A training step of banks of the default INN against its own matrix products, in float32 and in TF32.

Both ways, without the optimiser, at 1, 12 and 48 sites of width 768 and at 512 and 2,432 rows, which is what 64 texts
of `rotten_tomatoes` have. A step is to take at most twice its products at 1 site and 512 rows, where the GPU waits for
the host, and 1.2 times at 12 sites and 2,432 rows. Sizes that the free memory does not hold are left out. A CPU has no
TF32.

A step is what a fit takes, which replays recorded gradients where the GPU would wait (`recorded_steps`); "computed
anew" is the same without a recording.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from aligners.fitting.fits import Fit
from aligners.fitting.recorded_steps import RecordedSteps, recorder_for
from aligners.fitting.saved_bank import FORWARD
from aligners.maps.inn import INN
from benchmarks.harness import Figures, interleaved, ratio
from benchmarks.inn import products_of, step_of
from benchmarks.on_gpu.device import Device
from benchmarks.on_gpu.precision import Precision, within

SIZES = {1: (512, 2_432), 12: (512, 2_432), 48: (512, 2_432)}  # sites -> rows
SMALL_SIZES = {1: (8,), 2: (16,)}
BARS = {(1, 512): 2.0, (12, 2_432): 1.2}
IN: tuple[Precision, ...] = ("float32", "tf32")
FILLED = 0.9  # share of the free memory that a step may take


def run(figures: Figures, device: Device, small: bool) -> None:
    """Run the part."""
    width = 16 if small else 768
    rounds = 1 if small else 3
    bytes_each = 0.0  # of a row of a site, in the size before: weights make it less in larger ones
    for sites, numbers in (SMALL_SIZES if small else SIZES).items():
        device.clear()
        aligner = INN(sites, width, width).to(device.name)
        for rows in numbers:
            if bytes_each * sites * rows > FILLED * device.free():
                print(f"{sites} sites of {rows} rows do not fit in the free memory")
                continue
            taken = measure(figures, device, aligner, rows, rounds)
            bytes_each = taken / (sites * rows)
            device.clear()
        del aligner


def measure(
    figures: Figures, device: Device, aligner: INN, rows: int, rounds: int
) -> int:
    """Time a step of one size, and return the bytes that it takes."""
    sites = aligner.sites
    x, y = torch.randn(2, sites, rows, aligner.d_x, device=device.name)
    step = step_of(aligner, x, y)
    products = products_of(aligner, rows, device.name)
    size = f"{sites} x {rows:,} rows"
    aligner.zero_grad()
    taken = device.peak(step)
    figures.add(f"{size}: taken by a step, GB", taken / 1e9)
    for precision in IN:
        name = f"{size}, {precision}"
        work = {
            f"{name}: a step": as_fitted(aligner, x, y, precision),
            f"{name}: its products": within(precision, products),
            f"{name}: a step computed anew": within(precision, step),
        }
        seconds = interleaved(dict(work), rounds=rounds, device=device.name)
        figures.add_times(seconds)
        times = ratio(seconds, f"{name}: a step", f"{name}: its products")
        bar = BARS.get((sites, rows))
        figures.add(f"{name}: a step / its products", times, bar=bar)
    return taken


def as_fitted(
    aligner: INN, x: Tensor, y: Tensor, precision: Precision
) -> Callable[[], None]:
    """A step as a fit takes it; the first two calls prepare the replays."""
    anew = within(precision, step_of(aligner, x, y))
    recorder = recorder_for(x.device)
    if recorder is None:
        return anew
    recorded = RecordedSteps([Fit("inn", FORWARD, aligner)], precision, recorder)

    def run() -> None:
        if recorded.step(x, y) is None:
            anew()

    return run
