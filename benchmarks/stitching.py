"""A training step of stitching against the straightforward way, and a bank of all sites against one after another.

step: an affine map with a LayerNorm from the middle of X into the middle of Y, two random BERT classifiers: forward,
cross-entropy, backward, gradients of the map. The straightforward way runs both frozen models in full under plain
hooks, X without gradients, Y's weights not requiring them. With L blocks in either model, a backward pass as dear as a
forward one and the site at L/2 that is 5/2 L block passes; the front of X and the tail of Y, there and back, are 3/2 L.

bank: every block of X into the same block of Y, X's front run once, against one site after another.

memory: peak memory of a process that does nothing but three steps of either way.
"""

import resource
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.rows.policies import select_rows
from aligners.datamodules.task_targets import TaskBatch, classification_targets
from aligners.injection.behaviour import mapped_rows, read_all, stitched_logits
from aligners.injection.routes import Route
from aligners.injection.scoring.task_scores import chosen, unit_losses
from aligners.injection.stitching.stitching_training import bank_gradients
from aligners.maps.affine import AffineLayer
from aligners.models import FrozenModel
from benchmarks.harness import Figures, interleaved, parser_with_sizes, ratio
from benchmarks.stitched_forward import build

WAYS = ("stitched", "plain hooks")


def texts(batch: int, tokens: int, device: str) -> TaskBatch:
    """Random texts of half to all of `tokens`, padded, of two classes."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.linspace(tokens // 2, tokens, batch).round()
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    inputs = {
        "input_ids": torch.randint(5, 4096, mask.shape, generator=draw),
        "attention_mask": mask,
    }
    special, labels = ~mask.bool(), torch.arange(batch) % 2
    every = TextBatch((inputs,), (special,), torch.arange(batch), labels)
    return TaskBatch(
        every, select_rows(mask, special, "tokens"), classification_targets(labels)
    ).to(device)


def material(options: Namespace) -> tuple[FrozenModel, FrozenModel, TaskBatch]:
    """Both models and a batch."""
    x, y = (
        build(options.width, options.layers, seed, options.device) for seed in (0, 1)
    )
    return x, y, texts(options.batch, options.tokens, options.device)


def layers_for(route: Route) -> AffineLayer:
    """The stitching layers of a route, off the identity so that every gradient says something."""
    torch.manual_seed(0)
    width = route.source.width
    layer = AffineLayer(
        len(route.pairs), width, route.target.width, start="identity", norm=True
    )
    for weight in layer.parameters():
        weight.data += 0.02 * torch.randn_like(weight)
    return layer.to(route.target.device)


def stitched_step(route: Route, layer: AffineLayer, batch: TaskBatch) -> None:
    """One step as `stitching_training` takes it, up to the optimiser: gradients of every loss."""

    def loss(pair: int, rows: Tensor) -> Tensor:
        logits = stitched_logits(
            route.target, batch.inputs, route.pairs[pair][1], batch.rows, rows
        )
        return unit_losses(chosen(logits, batch.targets), batch.targets).mean()

    layer.zero_grad(set_to_none=True)
    mapped = mapped_rows(layer, read_all([route], batch).sources(route))
    _, gradients = bank_gradients(mapped, loss)
    mapped.backward(gradients)


def plain_step(route: Route, layer: AffineLayer, batch: TaskBatch) -> None:
    """The same with hooks alone, at the route's one site pair: both models are run in full."""
    read: list[Tensor] = []

    def keep(block: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        read.append(output)

    def replace(block: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return layer(read[0].flatten(0, 1)[None]).view_as(output)

    layer.zero_grad(set_to_none=True)
    ((i, j),) = route.pairs
    handles = [
        route.source.blocks[i - 1].register_forward_hook(keep),
        route.target.blocks[j - 1].register_forward_hook(replace),
    ]
    try:
        with torch.no_grad():
            route.source.model(**batch.inputs)
        logits = route.target.model(**batch.inputs).logits
    finally:
        for handle in handles:
            handle.remove()
    torch.nn.functional.cross_entropy(logits, batch.targets.answer).backward()


def gradients_of(layer: nn.Module, step: Callable[[], None]) -> list[Tensor]:
    """What a step leaves in each parameter of a layer."""
    step()
    return [
        weight.grad.clone() for weight in layer.parameters() if weight.grad is not None
    ]


def largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference of any gradient, in units of the largest entry of its parameter's."""
    return max(
        float((a - b).abs().max() / b.abs().max().clamp_min(torch.finfo(b.dtype).tiny))
        for a, b in zip(found, expected, strict=True)
    )


def one_step(
    x: FrozenModel, y: FrozenModel, batch: TaskBatch
) -> dict[str, tuple[AffineLayer, Callable[[], None]]]:
    """A step at the middle site each way, and its layers; those are equal."""
    route = Route("0_1", x, y, ((x.depth // 2, y.depth // 2),))
    layers = layers_for(route), layers_for(route)
    steps = (
        partial(stitched_step, route, layers[0], batch),
        partial(plain_step, route, layers[1], batch),
    )
    return dict(zip(WAYS, zip(layers, steps, strict=True), strict=True))


def step(
    figures: Figures,
    x: FrozenModel,
    y: FrozenModel,
    batch: TaskBatch,
    rounds: int,
    device: str,
) -> None:
    """A step at the middle site both ways: time and gradients."""
    ways = one_step(x, y, batch)
    found, expected = (gradients_of(*ways[name]) for name in WAYS)
    figures.add(
        "gradients, largest relative difference",
        largest_difference(found, expected),
        bar=1e-5,
    )
    seconds = interleaved(
        {name: run for name, (_, run) in ways.items()}, rounds=rounds, device=device
    )
    figures.add_times(seconds)
    figures.add(
        "plain hooks / stitched, one step",
        ratio(seconds, "plain hooks", "stitched"),
        bar=1.5,
        sense=">=",
    )


def bank(
    figures: Figures,
    x: FrozenModel,
    y: FrozenModel,
    batch: TaskBatch,
    rounds: int,
    device: str,
) -> None:
    """All sites in one run against one after another: time and gradients."""
    pairs = tuple((site, site) for site in range(1, min(x.depth, y.depth) + 1))
    together = Route("0_1", x, y, pairs)
    alone = [Route("0_1", x, y, (pair,)) for pair in pairs]
    layer, layers = layers_for(together), [layers_for(route) for route in alone]
    with torch.no_grad():
        for s, own in enumerate(layers):
            for weight, source in zip(
                own.parameters(), layer.parameters(), strict=True
            ):
                weight.copy_(source[s : s + 1])

    def one_after_another() -> None:
        for route, own in zip(alone, layers, strict=True):
            stitched_step(route, own, batch)

    one_after_another()
    expected = [
        torch.cat([weight.grad for weight in same if weight.grad is not None])
        for same in zip(*(own.parameters() for own in layers), strict=True)
    ]
    found = gradients_of(layer, lambda: stitched_step(together, layer, batch))
    figures.add(
        "gradients of a bank, largest relative difference",
        largest_difference(found, expected),
        bar=1e-5,
    )
    runs = {
        "bank": lambda: stitched_step(together, layer, batch),
        "one after another": one_after_another,
    }
    seconds = interleaved(runs, rounds=max(1, rounds // 3), device=device, warmup=1)
    figures.add_times(seconds)
    figures.add(
        "one after another / bank",
        ratio(seconds, "one after another", "bank"),
        bar=1.3,
        sense=">=",
    )


def peak(run: Callable[[], None], device: str) -> float:
    """Peak memory in MB of three runs: of the process on a CPU, of what is allocated on a GPU."""
    for _ in range(3):
        run()
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory(figures: Figures, sizes: list[str]) -> None:
    """Peak memory of a process for each way. First of all: on Linux a process starts at its parent's peak."""
    peaks = {}
    for name in WAYS:
        command = [sys.executable, __file__, "--memory-of", name, *sizes]
        peaks[name] = float(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )
        figures.add(f"peak memory, {name}, MB", peaks[name])
    figures.add(
        "peak memory, stitched / plain hooks",
        peaks["stitched"] / peaks["plain hooks"],
        bar=1.0,
    )


def main() -> None:
    """Run the benchmark."""
    arguments = parser_with_sizes(__doc__, layers=12, batch=16)
    arguments.add_argument(
        "--memory-of",
        choices=WAYS,
        help="print the peak memory of this way, and nothing else",
    )
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(peak(one_step(*material(options))[options.memory_of][1], options.device))
        return
    figures = Figures(options.device)
    sizes = ("width", "layers", "batch", "tokens", "threads", "device")
    memory(
        figures,
        [part for name in sizes for part in (f"--{name}", str(getattr(options, name)))],
    )
    x, y, batch = material(options)
    step(figures, x, y, batch, options.rounds, options.device)
    bank(figures, x, y, batch, options.rounds, options.device)
    figures.write(options.json)


if __name__ == "__main__":
    main()
