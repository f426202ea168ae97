"""Similarity of all layer pairs of two models: against torch_cka, pair by pair, and against the matrix products.

`benchmarks/similarity.py` says what each is. Without the package `torch_cka` that comparison is left out.
"""

from benchmarks import similarity
from benchmarks.harness import Figures
from benchmarks.on_gpu.device import Device


def run(figures: Figures, device: Device, small: bool) -> None:
    """Run the part."""
    if small:
        similarity.minibatch(figures, 2, 16, 64, 1, device.name)
        similarity.pairs(figures, 2, 16, 300, 1, device.name)
        similarity.rates(figures, 2, 16, 64, 1, device.name, side=64)
        return
    similarity.minibatch(figures, 12, 768, 1024, 3, device.name)
    device.clear()
    similarity.rates(figures, 13, 768, 1024, 5, device.name)
    device.clear()
    similarity.pairs(figures, 4, 256, 4000, 1, device.name)
