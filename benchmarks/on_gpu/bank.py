"""A bank of 12 INNs against a loop over 12 single ones (at least 8 times as fast), and its share of the matrix rate."""

from benchmarks.harness import Figures
from benchmarks.inn import bank_against_loop
from benchmarks.on_gpu.device import Device


def run(figures: Figures, device: Device, small: bool) -> None:
    """Run the part."""
    if small:
        bank_against_loop(figures, 3, 16, 16, 1, device.name)
        return
    bank_against_loop(figures, 12, 64, 768, 10, device.name)
