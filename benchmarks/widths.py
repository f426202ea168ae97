"""Do the default maps hold at every width? One set of defaults, held-out FVU against least squares and the truth.

States with a known answer: X has a power-law spectrum (variance 1/i along direction i) in a random basis; Y is X plus
smooth random features of it, sin(x W + phase), under the same spectrum in another basis, plus noise. The oracle is that
function itself. 20,000 rows to fit on, 4,000 held out. Steps of 256 rows.

States of real architectures: two BERTs of random weights and different seeds, 2 blocks, read on the embedded sentences
at block 2; a tenth of the texts is held out. There is no oracle; least squares is what a user would try.

The maps and the optimiser are the defaults of `train.py fit`, with the loss, the rates, the schedule and the clipping
of `aligners.fitting.alignment`; nothing is chosen by width. "start" is the untrained map.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from torch import Tensor

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.fitting.alignment import Alignment
from aligners.fitting.map_errors import MapErrors
from aligners.maps.base import Aligner
from aligners.maps.inn import INN
from aligners.maps.linear import Linear
from aligners.maps.matrices import Products
from aligners.maps.mlp import MLP
from aligners.similarity.algebra.moments import Moments, moments_of
from benchmarks.harness import Figures, parser
from benchmarks.parts import bert_config

MAPS: dict[str, Callable[[int, int, int], Aligner]] = {"inn": INN, "mlp": MLP}
NOISE = 0.03
SHARED = 0.7  # share of the variance of states that a token's type explains


class Rows(NamedTuple):
    """Paired rows (1, n, d): to fit on and held out, and what the true function gives for the latter."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor
    truth: Tensor | None


def synthetic(
    width: int,
    seed: int,
    rows: int = 20_000,
    held_out: int = 4_000,
    types: Tensor | None = None,
) -> Rows:
    """States with a known answer.

    Args:
        width: d of both.
        seed: of all that is drawn.
        rows: to fit on.
        held_out: further rows.
        types: (rows + held_out,) of the rows; those of one type share `SHARED` of their variance. Default: no types.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    spectrum = 1 / torch.arange(1, width + 1)
    spread = (spectrum / spectrum.mean()).sqrt()
    basis_x, basis_y = torch.linalg.qr(normal(2, width, width)).Q
    weight = normal(width, width)
    weight /= (spread[:, None] * weight).norm(dim=0)
    mixing, phase = (
        normal(width, width) / width**0.5,
        2 * torch.pi * torch.rand(width, generator=draw),
    )
    latent = normal(rows + held_out, width)
    if types is not None:
        of_types = normal(int(types.max()) + 1, width)
        latent = (1 - SHARED) ** 0.5 * latent + SHARED**0.5 * of_types[types]
    latent = latent * spread
    truth = latent + 2**0.5 * (torch.sin(latent @ weight + phase) @ mixing) * spread
    y = truth + NOISE**0.5 * normal(rows + held_out, width) * spread
    x, y, truth = (
        (part @ basis)[None]
        for part, basis in ((latent, basis_x), (y, basis_y), (truth, basis_y))
    )
    return Rows(x[:, :rows], y[:, :rows], x[:, rows:], y[:, rows:], truth[:, rows:])


def of_random_models(width: int, seed: int) -> Rows:
    """States of two untrained BERTs; a tenth of the rows is held out."""
    x, y = states_of_random_models(width, seed, 2)[:, None]
    fitted = 9 * x.shape[1] // 10
    return Rows(x[:, :fitted], y[:, :fitted], x[:, fitted:], y[:, fitted:], None)


def states_of_random_models(
    width: int, seed: int, models: int, texts: int = 1_500
) -> Tensor:
    """States of so many untrained BERTs at block 2, token rows of the embedded sentences, (models, n, d)."""
    from transformers import BertModel

    from aligners.datamodules.text.loading import load_texts
    from aligners.datamodules.text.sources import TextSource
    from aligners.models.tokenizers import word_pieces

    sentences = list(load_texts(TextSource(max_texts=texts)).fit["text"])
    tokenizer = word_pieces(sentences, 1_536, 128)
    config = bert_config(len(tokenizer), 2, width, head=32)
    states: list[list[Tensor]] = [[] for _ in range(models)]
    for which in range(models):
        torch.manual_seed(models * seed + which)
        model = BertModel(config).eval()
        for first in range(0, len(sentences), 64):
            batch = tokenizer(
                sentences[first : first + 64],
                padding=True,
                truncation=True,
                return_tensors="pt",
            )
            with torch.no_grad():
                found = model(**batch).last_hidden_state
            states[which].append(found[batch["attention_mask"].bool()])
    return torch.stack([torch.cat(each) for each in states])


class Course(NamedTuple):
    """What training gave: held-out FVU and FVU of the inverse before and after, and seconds a step."""

    start: tuple[float, float]
    end: tuple[float, float]
    diverged: int
    seconds: float


def held_out(aligner: Aligner, rows: Rows, moments: Moments) -> tuple[float, float]:
    """FVU, and FVU of the inverse, on the held-out rows."""
    errors = MapErrors(moments.mean_x, moments.mean_y).to(rows.x.device)
    with torch.no_grad():
        errors.update(aligner, rows.held_x, rows.held_y)
    found = errors.compute()
    return float(found["fvu"]), float(found["fvu_inverse"])


def train(
    factory: Callable[[int, int, int], Aligner],
    rows: Rows,
    steps: int,
    a_step: int,
    seed: int,
    products: Products,
) -> Course:
    """Train one map as `Alignment` does."""
    moments = moments_of(rows.x, rows.y)
    torch.manual_seed(seed)
    aligner = factory(1, rows.x.shape[-1], rows.y.shape[-1]).to(rows.x.device)
    aligner.fit(moments)
    start = held_out(aligner, rows, moments)
    began = time.perf_counter()
    diverged = Alignment(products=products).train_on_rows(
        aligner, rows.x, rows.y, steps, a_step, seed
    )
    seconds = (time.perf_counter() - began) / steps
    return Course(start, held_out(aligner, rows, moments), int(diverged), seconds)


def measure(
    figures: Figures,
    name: str,
    rows: Rows,
    steps: int,
    options: argparse.Namespace,
    seed: int,
) -> None:
    """All maps on one pair of states."""
    rows = Rows(*(None if part is None else part.to(options.device) for part in rows))  # type: ignore[arg-type]
    moments = moments_of(rows.x, rows.y)
    linear = Linear(1, rows.x.shape[-1], rows.y.shape[-1]).to(options.device)
    linear.fit(moments)
    base = held_out(linear, rows, moments)[0]
    figures.add(f"{name}: linear, FVU", base)
    if rows.truth is not None:
        total = (rows.held_y - moments.mean_y[:, None].float()).square().sum()
        figures.add(
            f"{name}: oracle, FVU",
            float((rows.truth - rows.held_y).square().sum() / total),
        )
    for kind in options.maps:
        found = train(MAPS[kind], rows, steps, options.rows, seed, options.products)
        figures.add(f"{name}: {kind}, start, FVU", found.start[0])
        figures.add(f"{name}: {kind}, {steps} steps, FVU", found.end[0])
        figures.add(f"{name}: {kind} / linear", found.end[0] / base, bar=1.0)
        if found.end[1] == found.end[1]:
            figures.add(f"{name}: {kind}, start, FVU of the inverse", found.start[1])
            figures.add(
                f"{name}: {kind}, {steps} steps, FVU of the inverse", found.end[1]
            )
        figures.add(f"{name}: {kind}, diverged at step", found.diverged, bar=0)
        figures.add(f"{name}: {kind}, seconds a step", found.seconds)


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--widths", type=int, nargs="*", default=[64, 256, 384, 768, 1024, 2048]
    )
    arguments.add_argument(
        "--models",
        type=int,
        nargs="*",
        default=[64, 384, 768],
        help="widths of random BERTs",
    )
    arguments.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    arguments.add_argument("--maps", nargs="*", default=list(MAPS), choices=list(MAPS))
    arguments.add_argument(
        "--products",
        default="float32",
        choices=get_args(Products),
        help="of the networks' layers",
    )
    arguments.add_argument("--rows", type=int, default=256, help="rows a step")
    arguments.add_argument("--steps", type=int, default=1000, help="up to width 512")
    arguments.add_argument(
        "--wide_steps",
        type=int,
        default=200,
        help="above it, where a step on a CPU takes seconds",
    )
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    figures = Figures(options.device)
    for seed in options.seeds:
        for width in options.widths:
            steps = options.steps if width <= 512 else options.wide_steps
            measure(
                figures,
                f"d = {width}, seed {seed}",
                synthetic(width, seed),
                steps,
                options,
                seed,
            )
            figures.write(options.json)
        for width in options.models:
            name = f"BERTs of width {width}, seed {seed}"
            steps = options.steps if width <= 512 else options.wide_steps
            measure(figures, name, of_random_models(width, seed), steps, options, seed)
            figures.write(options.json)


if __name__ == "__main__":
    main()
