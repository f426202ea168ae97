"""What is solved from moments: decompositions by driver, closed forms of 12 sites, measures of 2 x 13 layers.

`drivers`: SVDs of 8 float64 matrices by each driver of cuSOLVER, and their singular values by SVD and by
`values_by_gram`, with the largest error, for values from 1 to .01. `DRIVER` of
`aligners/similarity/algebra/decompositions.py` should be the fastest that agrees.

`closed forms`: each alone, then all as before an injection, where they share what they decompose. One H200 took 6.0 s
for these seven, one after the other, and 12 s on its CPU.

`measures`: the default ones of all layer pairs, as `evaluate.py similarity` computes them, against the float64 products
of their moments; all together should take at most 5 times as long. `waits` is how often the host waits for the device.
"""

from collections.abc import Callable
from functools import partial
from typing import get_args

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from aligners.fitting.fits import fit_map
from aligners.maps import CCA, INN, Linear, Permutation, Procrustes, Ridge
from aligners.maps.base import Aligner
from aligners.maps.canonical import PWCCA, SVCCA
from aligners.maps.shared_solutions import SharedMoments as SharedSolutions
from aligners.similarity.algebra.decompositions import Driver, thin_svd, values_by_gram
from aligners.similarity.algebra.grid import GridSums
from aligners.similarity.algebra.moments import Moments, moments_of
from aligners.similarity.catalogue import DEFAULT, Measure, catalogue
from aligners.similarity.controls import Sample
from aligners.similarity.functional.cca import SharedMoments
from aligners.similarity.outcome import evaluate
from benchmarks.harness import Figures, interleaved, ratio
from benchmarks.on_gpu.device import Device

CLOSED: tuple[type[Aligner], ...] = (
    *(Linear, Ridge, Procrustes, Permutation),
    *(CCA, SVCCA, PWCCA),
)
ALL = "all closed forms"
HALF_OF_BEFORE = 6.0  # seconds; on the CPU of the H200 they took 12
MOST_PRODUCTS = 5.0
ACCURACY = 1e-12  # of singular values
BATCH = 1_024  # rows that are summed at once
FAMILIES = ("moments", "rows")


def run(figures: Figures, device: Device, small: bool) -> None:
    """Run the part."""
    widths = (8, 16) if small else (64, 256, 768)
    for width in widths:
        drivers(figures, device, width)
        device.clear()
    closed_forms(figures, device, *((2, 16, 200) if small else (12, 768, 4_000)))
    device.clear()
    measures(figures, device, *((2, 16, 200) if small else (13, 768, 35_233)))


def drivers(figures: Figures, device: Device, width: int) -> None:
    """Time decompositions of matrices of one width, and compare their singular values."""
    known = torch.logspace(0, -2, width, dtype=torch.float64)
    draw = torch.randn(2, 8, width, width, dtype=torch.float64)
    u, v = torch.linalg.qr(draw).Q
    matrices = (u * known @ v.mT).to(device.name)

    names: tuple[Driver | None, ...] = (None,)
    if device.gpu and matrices.is_cuda:
        names = (None, *get_args(Driver))
    alternatives: dict[str, Callable[[], object]] = {}
    found = {}
    for name in names:
        label = f"SVD of 8 x {width}, {name or 'default'}"
        alternatives[label] = partial(thin_svd, matrices, name)
        found[label] = thin_svd(matrices, name)[1]
    values = f"values of 8 x {width}"
    by_svd = partial(torch.linalg.svdvals, matrices)
    by_gram = partial(values_by_gram, matrices)
    alternatives |= {f"{values} by SVD": by_svd, f"{values} by eigh": by_gram}
    found[f"{values} by eigh"] = by_gram()

    seconds = interleaved(alternatives, rounds=2, device=device.name, warmup=0)
    figures.add_times(seconds)
    times = ratio(seconds, f"{values} by SVD", f"{values} by eigh")
    figures.add(f"{values}, by SVD / by eigh", times)
    for label, of_device in found.items():
        difference = (of_device.cpu() - known).abs().max()
        figures.add(f"{label}, difference", float(difference), bar=ACCURACY)


def closed_forms(
    figures: Figures, device: Device, sites: int, width: int, rows: int
) -> None:
    """Time the closed forms, and the start of the INN."""
    moments = moments_of(*states(sites, rows, width, device.name))
    sizes = sites, width, width
    warm = moments_of(*states(sites, rows, width, device.name))

    def fit(kinds: tuple[type[Aligner], ...], given: Moments) -> None:
        shared = SharedSolutions.of(given)
        for kind in kinds:
            aligner = kind(*sizes).to(device.name)
            fit_map(kind.__name__, aligner, shared)

    alternatives: dict[str, tuple[type[Aligner], ...]] = {}
    for kind in CLOSED:
        alternatives[kind.__name__] = (kind,)
    alternatives[ALL] = CLOSED
    alternatives["start of the INN"] = (INN,)
    fit((*CLOSED, INN), warm)
    for name, kinds in alternatives.items():
        work = partial(fit, kinds, moments)
        seconds = device.seconds(work)
        bar = HALF_OF_BEFORE if name == ALL else None
        figures.add(f"{name}, {sites} x {width}, seconds", seconds, bar=bar)
        figures.add(f"{name}, waits", device.waits(work))


def measures(
    figures: Figures, device: Device, layers: int, width: int, rows: int
) -> None:
    """Time the default measures, one after the other, as they share what is decomposed."""
    given = Given(device, 2, width, 2 * width + 100)
    for measure in default_measures():
        given.evaluate(measure)  # the first time kernels are loaded

    given = Given(device, layers, width, rows)
    of_products = given.seconds
    figures.add(f"products of 2 x {layers} layers, seconds", of_products)
    total = 0.0
    for measure in default_measures():
        seconds = device.seconds(partial(given.evaluate, measure))
        total += seconds
        figures.add(f"{measure.name}, seconds", seconds)
        figures.add(f"{measure.name} / products", seconds / of_products)
    norms = device.seconds(given.nuclear_norms)
    figures.add("nuclear norms / products", norms / of_products)
    times = (total + norms) / of_products
    figures.add("default measures / products", times, bar=MOST_PRODUCTS)

    def again() -> None:
        given.forget()
        for measure in default_measures():
            given.evaluate(measure)

    figures.add("default measures, waits", device.waits(again))


class Given:
    """What the default measures are computed from: moments and a sample of rows of two models of random states.

    Args:
        device: where.
        layers: of each model.
        width: of both.
        rows: number of rows.

    Attributes:
        seconds: that the products of the moments took.
    """

    def __init__(self, device: Device, layers: int, width: int, rows: int) -> None:
        x, y = states(layers, rows, width, device.name)
        sums = GridSums.zeros(layers, width, layers, width, device.name)

        def add() -> None:
            batches = zip(x.split(BATCH, 1), y.split(BATCH, 1), strict=True)
            for of_x, of_y in batches:
                sums.add_(of_x, of_y)

        self.seconds = device.seconds(add)
        self.moments = sums.moments()
        budget = catalogue()["rsa"].budget
        text = torch.zeros(rows, dtype=torch.int64)[:budget]
        self.sample = Sample(x[:, :budget], y[:, :budget], text)
        self.forget()

    def forget(self) -> None:
        """Forget what measures have decomposed."""
        self.shared = SharedMoments(self.moments)

    def evaluate(self, measure: Measure) -> None:
        """Compute a measure in both directions."""
        given = self.shared if measure.family == "moments" else self.sample
        evaluate(measure, given)

    def nuclear_norms(self) -> None:
        """Compute the nuclear norms of all layers."""
        self.shared.white_x.nuclear_norm()
        self.shared.white_y.nuclear_norm()


def default_measures() -> list[Measure]:
    """The default measures of moments and of rows, in the order in which a pass computes them."""
    known = catalogue()
    wanted = [known[name] for name in DEFAULT if known[name].family in FAMILIES]
    return sorted(wanted, key=lambda measure: measure.symmetric)


def states(layers: int, rows: int, width: int, device: str) -> tuple[Tensor, Tensor]:
    """Paired states after a LayerNorm, (L, N, d) each: turned in every layer of Y, with noise on both sides."""
    draw = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, generator=draw, device=device)
    scale = torch.linspace(2, 0.2, width, device=device)
    common = normal(rows, width) * scale
    maps = normal(layers, width, width) / width**0.5
    x = common + 0.5 * normal(layers, rows, width)
    y = common @ maps + 0.5 * normal(layers, rows, width)
    features = (width,)
    return layer_norm(x, features), layer_norm(y, features)
