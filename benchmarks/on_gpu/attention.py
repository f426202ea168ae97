"""States under sdpa, and under FlashAttention if the package is installed, against eager attention; padded or not.

The error is ‖a − b‖ / ‖b − mean‖ at the worst site, over real tokens. In bfloat16 all are set against eager attention
in float32 with the same weights, so that eager itself has an error too: another way may have half as much again.
Without padding, torch's own sdpa uses a FlashAttention kernel in bfloat16 where it has one.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from aligners.datamodules.rows.read_rows import read_rows
from aligners.models import FrozenModel
from benchmarks.harness import Figures
from benchmarks.on_gpu.device import Device
from benchmarks.on_gpu.models import made, padded, rounded, unlike

IN_FLOAT32, AGAINST_EAGER = 1e-4, 1.5
NAMES = {True: "padded", False: "not padded"}


def run(figures: Figures, device: Device, small: bool) -> None:
    """Run the part."""
    flash = device.gpu and find_spec("flash_attn") is not None
    if not flash:
        print(
            "FlashAttention (flash_attn) is not installed, or there is no GPU: left out"
        )
    count, longest = (3, 16) if small else (16, 256)
    for kind in ("BERT", "Llama"):
        model = made(kind, small, device.name)
        exact = {
            some: states(model, "eager", count, longest, some) for some in (True, False)
        }
        for some, expected in exact.items():
            found = states(model, "sdpa", count, longest, some)
            figures.add(
                f"{model.name}, {NAMES[some]}: sdpa in float32, error",
                unlike(found, expected),
                bar=IN_FLOAT32,
            )
        half = FrozenModel(rounded(model.model, torch.bfloat16), name=model.name)
        for some, expected in exact.items():
            name = f"{model.name}, {NAMES[some]}"
            eager = unlike(states(half, "eager", count, longest, some), expected)
            figures.add(f"{name}: eager in bfloat16, error", eager)
            for way in ("sdpa", *(["flash_attention_2"] if flash else [])):
                found = states(half, way, count, longest, some)
                bar = AGAINST_EAGER * eager
                figures.add(
                    f"{name}: {way} in bfloat16, error",
                    unlike(found, expected),
                    bar=bar,
                )
        del model, half, exact
        device.clear()


def states(
    model: FrozenModel, way: str, count: int, longest: int, some: bool
) -> Tensor:
    """The states of all real tokens at all sites under a kind of attention, (S, N, d); with some padding or none."""
    model.model.set_attn_implementation(way)
    inputs, rows = padded(model, count, longest, longest // 3 if some else longest)
    return read_rows(model, inputs, range(model.depth + 1), rows)
