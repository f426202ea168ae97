"""Memory of a fit of a bank against what `train.py fit` announces before it (`--sites_at_once`).

The default maps of all sites: moments of some batches in float64, closed forms and starts, steps of the trained map,
and a copy of its best state. A plan fills `FILLED` of the free memory, so what is taken may exceed the estimate by as
much as that leaves.
"""

import torch

from aligners.fitting.alignment import Alignment
from aligners.fitting.parts import FILLED, bytes_a_site
from aligners.similarity.algebra.moments import MomentsMetric
from benchmarks.harness import Figures
from benchmarks.on_gpu.device import Device


def run(figures: Figures, device: Device, small: bool) -> None:
    """Run the part."""
    sites, width, rows, batches, steps = (
        (2, 16, 64, 2, 2) if small else (4, 768, 2048, 2, 4)
    )
    x = torch.randn(sites, rows, width, device=device.name)
    y = x.roll(1, 2) + torch.tanh(x)

    def fit() -> None:
        module = Alignment().to(device.name)
        module.build(sites, width, width)
        module.to(device.name)
        moments = MomentsMetric(sites, width, width)
        for _ in range(batches):
            moments.update(x, y)
        module.fit_moments(moments.compute(), None)
        for fit in module.trained():
            best = {
                name: value.clone() for name, value in fit.aligner.state_dict().items()
            }
            module.train_on_rows(fit.aligner, x, y, steps, rows, seed=0)
            del best

    announced = sites * bytes_a_site(Alignment(), width, width, rows)
    taken = device.peak(fit)
    figures.add(f"announced for {sites} sites of width {width}, GB", announced / 1e9)
    figures.add("taken, GB", taken / 1e9)
    figures.add(
        "taken / announced", taken / announced, bar=1 / FILLED if device.gpu else None
    )
