"""Does a crosscoder find the features that two models share, and each model's own, where these are known?

Rows are sums of a few of `features` directions of norm 1, with sizes between 0.5 and 1.5, plus noise. Feature i is
present in proportion to (i + 10)^-1, in `present` features a row on average, which makes the rarest ten to a hundred
times as rare as the most frequent. A tenth of the features, of all frequencies, is X's alone, a tenth Y's; every other
one has a direction in X and an unrelated one in Y. Y's states are scaled and shifted.

A shared feature is found if one latent's decoder has a cosine of at least .9 with it in both models; an own feature if
a latent has it in its model, and its decoder in the other model is at most a tenth of that. Training is that of
`train.py fit` on rows in memory. Each number of steps is a run of its own, with the whole course of the learning rate,
so that several are a curve by rows seen. "k found" is the mean number of active latents on held-out rows.
"""

import sys
import time
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.fitting.alignment import Alignment
from aligners.maps.sparse.sparse_aligner import SparseAligner
from aligners.similarity.algebra.moments import moments_of
from benchmarks.harness import Figures, parser

OWN = 10  # every tenth feature is X's own, and every tenth Y's
COSINE = 0.9
ABSENT = 0.1
RATE = 1e-2  # the default of `train.py fit`


class Planted(NamedTuple):
    """Features of two models.

    Attributes:
        of_x: directions in X, zero for Y's own features, (n, d_x); of_y: likewise in Y.
        chances: of being present in a row, (n,).
        noise: deviation of each dimension.
    """

    of_x: Tensor
    of_y: Tensor
    chances: Tensor
    noise: float

    def rows(self, number: int, seed: int) -> tuple[Tensor, Tensor]:
        """Draw paired rows, (1, number, d_x) and (1, number, d_y)."""
        draw = torch.Generator().manual_seed(seed)
        shape = (number, len(self.chances))
        sizes = torch.rand(shape, generator=draw) + 0.5
        present = torch.rand(shape, generator=draw) < self.chances
        codes = sizes * present
        states = []
        for directions in (self.of_x, self.of_y):
            noise = torch.randn(number, directions.shape[1], generator=draw)
            states.append(codes @ directions + self.noise * noise)
        x, y = states
        return x[None], 3 * y[None] + 1


def planted(
    d_x: int, d_y: int, features: int, present: float, noise: float, seed: int
) -> Planted:
    """Draw features.

    Args:
        d_x: width of X.
        d_y: width of Y.
        features: their number.
        present: how many a row has on average.
        noise: norm of a row's noise.
        seed: of all directions.
    """
    draw = torch.Generator().manual_seed(seed)
    of_x = torch.randn(features, d_x, generator=draw)
    of_y = torch.randn(features, d_y, generator=draw)
    of_x = torch.nn.functional.normalize(of_x, dim=1)
    of_y = torch.nn.functional.normalize(of_y, dim=1)
    of_y[::OWN] = 0
    of_x[OWN // 2 :: OWN] = 0
    weights = 1 / (torch.arange(features) + 10)
    chances = present * weights / weights.sum()
    return Planted(of_x, of_y, chances, noise / d_x**0.5)


class Found(NamedTuple):
    """Shares of the planted features that are found, and the share of own latents that no own feature explains."""

    shared: float
    own: float
    false_own: float


def found(features: Planted, decoder_x: Tensor, decoder_y: Tensor) -> Found:
    """Compare planted features with decoders (m, d_x) and (m, d_y), in the scale of states divided by theirs."""
    cosines_x = _cosines(features.of_x, decoder_x)
    cosines_y = _cosines(features.of_y, decoder_y)
    norm_x = decoder_x.norm(dim=1)
    norm_y = decoder_y.norm(dim=1)
    in_x = features.of_x.norm(dim=1) > 0
    in_y = features.of_y.norm(dim=1) > 0
    of_x_alone = norm_y < ABSENT * norm_x
    of_y_alone = norm_x < ABSENT * norm_y

    both = torch.minimum(cosines_x, cosines_y).amax(1) >= COSINE
    alone_x = (cosines_x * of_x_alone).amax(1) >= COSINE
    alone_y = (cosines_y * of_y_alone).amax(1) >= COSINE
    own = torch.cat([alone_x[in_x & ~in_y], alone_y[in_y & ~in_x]])

    explained_x = cosines_x[in_x & ~in_y].amax(0) >= COSINE
    explained_y = cosines_y[in_y & ~in_x].amax(0) >= COSINE
    false = (of_x_alone & ~explained_x) | (of_y_alone & ~explained_y)
    return Found(
        float(both[in_x & in_y].double().mean()),
        float(own.double().mean()),
        float(false.double().mean()),
    )


def _cosines(directions: Tensor, decoder: Tensor) -> Tensor:
    unit = torch.nn.functional.normalize(decoder, dim=1)
    return directions @ unit.T


def measure(
    figures: Figures,
    name: str,
    features: Planted,
    aligner: SparseAligner,
    *,
    rate: float,
    steps: int,
    a_step: int,
    rows: int,
    seed: int,
) -> None:
    """Train a crosscoder on rows of the features, and record what it finds."""
    x, y = features.rows(rows, seed + 100)
    held_x, held_y = features.rows(4096, seed + 200)
    aligner.fit(moments_of(x, y))

    def adam(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0, fused=True)

    module = Alignment(optimizer=adam)
    began = time.perf_counter()
    module.train_on_rows(aligner, x, y, steps, a_step, seed)
    seconds = (time.perf_counter() - began) / steps
    aligner.eval().requires_grad_(False)

    crosscoder = aligner.crosscoder
    codes = aligner.codes(held_x, held_y)
    fired = (codes > 0).double()
    result = found(features, crosscoder.decoder(0)[0], crosscoder.decoder(1)[0])
    figures.add(f"{name}: shared found", result.shared)
    figures.add(f"{name}: own found", result.own)
    figures.add(f"{name}: false own, of all latents", result.false_own)
    errors = aligner.reconstruction_errors(held_x, held_y)
    figures.add(f"{name}: FVU", float(errors.mean()))
    figures.add(f"{name}: k found", float(fired.sum(2).mean()))
    silent = fired[0].amax(0) == 0
    figures.add(f"{name}: dead", float(crosscoder.dead().double().mean()))
    figures.add(f"{name}: silent on held-out rows", float(silent.double().mean()))
    figures.add(f"{name}: seconds a step", seconds)


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--widths", type=int, nargs="*", default=[64, 384])
    arguments.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    arguments.add_argument("--features", type=float, default=4, help="by width")
    arguments.add_argument(
        "--expansion", type=float, default=8, help="latents by width"
    )
    arguments.add_argument("--present", type=float, default=8, help="features a row")
    arguments.add_argument("--noise", type=float, default=0.2)
    arguments.add_argument("--active", type=int, nargs="*", default=[8])
    arguments.add_argument("--rates", type=float, nargs="*", default=[RATE])
    arguments.add_argument("--steps", type=int, nargs="*", default=[1000])
    arguments.add_argument("--a_step", type=int, default=512, help="rows a step")
    arguments.add_argument("--rows", type=int, default=50_000)
    arguments.add_argument("--own", type=float, default=0.0)
    arguments.add_argument("--dead_after", type=int)
    arguments.add_argument("--auxiliary", type=float, nargs="*", default=[1 / 32])
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    figures = Figures(options.device)
    for width, seed in product(options.widths, options.seeds):
        number = round(options.features * width)
        features = planted(width, width, number, options.present, options.noise, seed)
        for active, rate, auxiliary, steps in product(
            options.active, options.rates, options.auxiliary, options.steps
        ):
            torch.manual_seed(seed)
            aligner = SparseAligner(
                1,
                width,
                width,
                latents=round(options.expansion * width),
                active=active,
                own=options.own,
                dead_after=options.dead_after,
                auxiliary=auxiliary,
            )
            seen = steps * options.a_step
            name = f"d {width}, seed {seed}, k {active}, rate {rate:g}"
            name += f", auxiliary {auxiliary:g}, {seen:,} rows seen"
            measure(
                figures,
                name,
                features,
                aligner,
                rate=rate,
                steps=steps,
                a_step=options.a_step,
                rows=options.rows,
                seed=seed,
            )
    figures.write(options.json)


if __name__ == "__main__":
    main()
