"""States under sdpa, and under FlashAttention if the package is installed, against eager attention; padded or not.

The error is ‖a − b‖ / ‖b − mean‖ at the worst site, over real tokens. In bfloat16 all are set against eager attention
in float32 with the same weights, so that eager itself has an error too: another way may have half as much again.
Without padding, torch's own sdpa uses a FlashAttention kernel in bfloat16 where it has one.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from aligners.models import FrozenModel
from benchmarks.harness import Figures
from benchmarks.on_gpu.device import Device
from benchmarks.on_gpu.models import made, rounded, unlike
from datamodules.rows.policies import select_rows
from datamodules.rows.reading import read_rows

IN_FLOAT32, AGAINST_EAGER = 1e-4, 1.5


def run(figures: Figures, device: Device, small: bool) -> None:
    """Run the part."""
    flash = device.gpu and find_spec("flash_attn") is not None
    if not flash:
        print("FlashAttention (flash_attn) is not installed, or there is no GPU: left out")
    count, longest = (3, 16) if small else (16, 256)
    for kind in ("BERT", "Llama"):
        model = made(kind, small, device.name)
        exact = {padded: states(model, "eager", count, longest, padded) for padded in (True, False)}
        for padded, expected in exact.items():
            name = f"{model.name}, {'padded' if padded else 'not padded'}"
            found = states(model, "sdpa", count, longest, padded)
            figures.add(f"{name}: sdpa in float32, error", unlike(found, expected), bar=IN_FLOAT32)
        half = FrozenModel(rounded(model.model, torch.bfloat16), name=model.name)
        for padded, expected in exact.items():
            name = f"{model.name}, {'padded' if padded else 'not padded'}"
            eager = unlike(states(half, "eager", count, longest, padded), expected)
            figures.add(f"{name}: eager in bfloat16, error", eager)
            for way in ("sdpa", *(["flash_attention_2"] if flash else [])):
                found = states(half, way, count, longest, padded)
                bar = AGAINST_EAGER * eager
                figures.add(f"{name}: {way} in bfloat16, error", unlike(found, expected), bar=bar)
        del model, half, exact
        device.clear()


def states(model: FrozenModel, way: str, count: int, longest: int, padded: bool) -> Tensor:
    """The states of all real tokens at all sites under a kind of attention, (S, N, d)."""
    model.model.set_attn_implementation(way)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 4096, (count, longest), generator=draw)
    lengths = torch.linspace(longest // 3, longest, count).long() if padded else torch.full((count,), longest)
    mask = (torch.arange(longest) < lengths[:, None]).long()
    chosen = select_rows(mask, torch.zeros_like(mask).bool(), "tokens").to(model.device)
    inputs = {"input_ids": ids, "attention_mask": mask}
    given = {name: value.to(model.device) for name, value in inputs.items()}
    return read_rows(model, given, range(model.depth + 1), chosen)
