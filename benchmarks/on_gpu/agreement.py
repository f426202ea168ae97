"""The GPU against the CPU: closed forms, measures, a trained INN and injection, each within a bound; self-tests exact.

Rows have a known spectrum (`benchmarks/widths.py`), models random weights. All is in float32 without TF32, moments and
decompositions in float64. Where there is no GPU, the CPU is compared with itself.
"""

import torch
from torch import Tensor

from aligners.datamodules.rows.read_rows import read_rows
from aligners.injection.behaviour import stitched_logits
from aligners.maps import CCA, INN, Linear, Permutation, Procrustes, Ridge
from aligners.maps.base import Aligner
from aligners.models import FrozenModel
from aligners.similarity.algebra.moments import moments_of
from benchmarks.harness import Figures
from benchmarks.known_cases import CASES, MEASURES
from benchmarks.on_gpu.device import Device
from benchmarks.on_gpu.models import made, padded
from benchmarks.widths import Rows, synthetic, train

CLOSED = (Linear, Ridge, Procrustes, Permutation, CCA)
BOUNDS = {"closed forms": 1e-4, "measures": 1e-6, "INN": 1e-3, "injection": 1e-4}


def run(figures: Figures, device: Device, small: bool) -> None:
    """Run the part."""
    places = "cpu", device.name
    rows = [
        on(
            synthetic(16, 0, 200, 50) if small else synthetic(256, 0, 8_000, 1_000),
            place,
        )
        for place in places
    ]
    for closed in CLOSED:
        here, there = (mapped(closed, each) for each in rows)
        difference = float((there - here).abs().max() / here.abs().max())
        figures.add(
            f"{closed.__name__}, largest relative difference",
            difference,
            bar=BOUNDS["closed forms"],
        )
    x, y = CASES["X, noisy"]["half noise"](torch.Generator().manual_seed(0))
    for name, measure in MEASURES.items():
        here, there = (
            measure(x[None].to(place), y[None].to(place)).cpu() for place in places
        )
        figures.add(
            f"{name}, difference",
            float((there - here).abs().max()),
            bar=BOUNDS["measures"],
        )
    steps, a_step = (2, 32) if small else (20, 256)
    ends = [train(INN, each, steps, a_step, 0, "float32").end for each in rows]
    for what, a, b in zip(("FVU", "FVU of the inverse"), *ends, strict=True):
        figures.add(
            f"INN after {steps} steps, {what}, relative difference",
            abs(a - b) / a,
            bar=BOUNDS["INN"],
        )
    injection(figures, device, small)
    device.clear()
    for kind in ("BERT", "Llama"):
        for dtype in (torch.float32, torch.bfloat16):
            model, name = (
                made(kind, small, device.name, dtype, headed=True),
                str(dtype).removeprefix("torch."),
            )
            figures.add(
                f"self_test of {model.name}, {name}, exact",
                exact(model),
                bar=1,
                sense=">=",
            )
            del model
            device.clear()


def on(rows: Rows, place: str) -> Rows:
    """The rows on a device."""
    return Rows(*(None if part is None else part.to(place) for part in rows))  # type: ignore[arg-type]


def mapped(kind: type[Aligner], rows: Rows) -> Tensor:
    """What a closed form makes of the held-out rows, on the CPU."""
    aligner = kind(1, rows.x.shape[2], rows.y.shape[2]).to(rows.x.device)
    aligner.fit(moments_of(rows.x, rows.y))
    with torch.no_grad():
        return aligner(rows.held_x).cpu()


def injection(figures: Figures, device: Device, small: bool) -> None:
    """Logits and losses of Y with mapped states of X at every site."""
    found = [injected(place, small) for place in ("cpu", device.name)]
    (logits, losses), (logits_there, losses_there) = found
    difference = float((logits_there - logits).abs().max() / logits.abs().max())
    figures.add(
        "injection, logits, largest relative difference",
        difference,
        bar=BOUNDS["injection"],
    )
    difference = float((losses_there - losses).abs().max())
    figures.add(
        "injection, losses of sites, largest difference",
        difference,
        bar=BOUNDS["injection"],
    )
    agree = float((logits_there.argmax(-1) == logits.argmax(-1)).double().mean())
    figures.add("injection, share of equal answers", agree, bar=1, sense=">=")


@torch.no_grad()
def injected(place: str, small: bool) -> tuple[Tensor, Tensor]:
    """What Y answers with X's states, mapped by least squares: logits (S, B, C), and the loss of each site, (S,)."""
    x, y = (
        made("BERT", small, "cpu", headed=True, seed=seed).to(place) for seed in (0, 1)
    )
    count, longest, sites = *((6, 16) if small else (32, 48)), range(x.depth + 1)
    inputs, rows = padded(x, count, longest, longest // 3)
    of_x, of_y = (read_rows(model, inputs, sites, rows) for model in (x, y))
    layer = Linear(len(sites), x.width, y.width, ridge=0.1).to(place)
    layer.fit(moments_of(of_x, of_y))
    each = [
        stitched_logits(y, inputs, site, rows, at)
        for site, at in zip(sites, layer(of_x), strict=True)
    ]
    answers = torch.arange(count, device=place) % 2
    losses = [torch.nn.functional.cross_entropy(logits, answers) for logits in each]
    return torch.stack(each).cpu(), torch.stack(losses).cpu()


def exact(model: FrozenModel) -> int:
    """1 where injecting what was read changes no bit of the logits, else 0; what it changes is printed."""
    try:
        model.self_test(padded(model, 4, 16, 5)[0])
    except RuntimeError as error:
        print(error)
        return 0
    return 1
