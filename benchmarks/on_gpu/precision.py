"""TF32 and bfloat16 against float32: errors and speeds of reading and of moments.

The error of states is ‖a − b‖ / ‖b − mean‖ at the worst site. That of moments is the largest difference of a linear CKA
of all layer pairs from the one whose products are float64; TF32 and bfloat16 there are those of the cross products
alone. A CPU has no TF32.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Literal

import torch
from torch import Tensor

from aligners.maps.matrices import products_in
from aligners.models import FrozenModel
from aligners.similarity.algebra.grid import GridSums
from aligners.similarity.functional.cka import linear_cka
from benchmarks.harness import Figures, interleaved, ratio
from benchmarks.on_gpu.device import Device
from benchmarks.on_gpu.models import Reading, made, rounded, unlike

Precision = Literal["float32", "tf32"]  # of products of float32 matrices
READ_IN = ("float32", "tf32", "bfloat16")
STATES = {"tf32": 1e-2, "bfloat16": 5e-2}  # the largest error that is not a defect
CKA = {"float32": 1e-6, "tf32": 1e-4, "bfloat16": 1e-3}


def run(figures: Figures, device: Device, small: bool) -> None:
    """Run the part."""
    rounds = 1 if small else 5
    states = read(figures, device, small, rounds)
    moments(figures, device, states, rounds)


def within(precision: Precision, work: Callable[[], object]) -> Callable[[], None]:
    """The same work with products of this precision."""

    def run() -> None:
        with products_in(precision):
            work()

    return run


def read(figures: Figures, device: Device, small: bool, rounds: int) -> Tensor:
    """Reading; the states of the BERT in float32 are returned, (S, N, d)."""
    kept = torch.empty(0)
    for kind in ("Llama", "BERT"):
        model = made(kind, small, device.name)
        half = FrozenModel(
            rounded(deepcopy(model.model), torch.bfloat16), name=model.name
        )
        exact, halved = (
            Reading(each, device, *((8, 4, 16) if small else (256, 64)))
            for each in (model, half)
        )
        kept = exact.states()
        with products_in("tf32"):
            found = {"tf32": exact.states(), "bfloat16": halved.states()}
        for products, states in found.items():
            figures.add(
                f"{model.name}: states in {products}, error",
                unlike(states, kept),
                bar=STATES[products],
            )
        names = {}
        for products in READ_IN:
            names[products] = f"{model.name}: reading, {products}"
        work = (exact.read, within("tf32", exact.read), halved.read)
        seconds = interleaved(
            dict(zip(names.values(), work, strict=True)),
            rounds=rounds,
            device=device.name,
        )
        add(figures, names, seconds)
        del model, half, exact, halved, found, work
        device.clear()
    return kept


def moments(figures: Figures, device: Device, states: Tensor, rounds: int) -> None:
    """Sums over the states and what CKA makes of them: the products of all layer pairs in each precision."""
    layers, _, width = states.shape

    def summed(products: torch.dtype) -> Tensor:
        sums = GridSums.zeros(layers, width, layers, width, device.name)
        for rows in states.split(1024, 1):
            sums.add_(rows, rows, products)
        return linear_cka(sums.moments())

    def in_tf32() -> Tensor:
        with products_in("tf32"):
            return summed(torch.float32)

    ways: dict[str, Callable[[], Tensor]] = {
        "float64": lambda: summed(torch.float64),
        "float32": lambda: summed(torch.float32),
        "tf32": in_tf32,
        "bfloat16": lambda: summed(torch.bfloat16),
    }
    exact = ways["float64"]()
    for products, bar in CKA.items():
        difference = float((ways[products]() - exact).abs().max())
        figures.add(
            f"CKA from moments in {products}, largest difference", difference, bar=bar
        )
    names = {products: f"moments, {products}" for products in ways}
    work: dict[str, Callable[[], object]] = {
        names[products]: way for products, way in ways.items()
    }
    add(figures, names, interleaved(work, rounds=rounds, device=device.name, warmup=1))


def add(
    figures: Figures, names: dict[str, str], seconds: dict[str, list[float]]
) -> None:
    """The times, and how many times as fast as the first each is."""
    figures.add_times(seconds)
    first, *others = names.values()
    for name in others:
        figures.add(
            f"{first} / {name.rpartition(', ')[2]}", ratio(seconds, first, name)
        )
