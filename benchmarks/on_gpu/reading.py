"""Reading all sites against the model's bare forward pass (at least half its rate), and how often the host waits.

At width 768 a BERT of 12 blocks in float32, at 2,048 a Llama of 16 in float32 and bfloat16. Batches lie in page-locked
memory, as a loader gives them; reading also chooses rows, moves the batch and gathers. The host waits for the GPU
where torch itself notices it; what the model's own forward pass waits for is taken off.
"""

import torch

from benchmarks.harness import Figures, interleaved, ratio
from benchmarks.on_gpu.device import Device
from benchmarks.on_gpu.models import Reading, made

MODELS = (("BERT", torch.float32), ("Llama", torch.float32), ("Llama", torch.bfloat16))


def run(figures: Figures, device: Device, small: bool) -> None:
    """Run the part."""
    for kind, dtype in MODELS:
        model = made(kind, small, device.name, dtype)
        name = f"{model.name}, {str(dtype).removeprefix('torch.')}"
        reading = Reading(model, device, *((8, 4, 16) if small else (512, 64)))
        rounds = 1 if small else 7
        seconds = interleaved(
            {f"{name}: reading": reading.read, f"{name}: bare forward": reading.bare},
            rounds=rounds,
            device=device.name,
            warmup=1 if small else 3,
        )
        figures.add_times(seconds)
        share = ratio(seconds, f"{name}: bare forward", f"{name}: reading")
        figures.add(
            f"{name}: rows/s, reading / bare forward", share, bar=0.5, sense=">="
        )
        read, own = (
            device.waits(work) / len(reading.batches)
            for work in (reading.read, reading.bare)
        )
        figures.add(f"{name}: waits of a batch, bare forward", own)
        figures.add(f"{name}: waits that reading adds to a batch", read - own, bar=0)
        del model, reading
        device.clear()
