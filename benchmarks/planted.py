"""Does a crosscoder find the features that two models share, and each model's own, where these are known?

Rows are sums of a few of `features` directions of norm 1, with sizes between 0.5 and 1.5, plus noise. Feature i is
present in proportion to (i + 10)^-1, in `present` features a row on average, which makes the rarest ten to a hundred
times as rare as the most frequent. A tenth of the features, of all frequencies, is X's alone, a tenth Y's; every other
one has a direction in X and an unrelated one in Y. Y's states are scaled and shifted.

A shared feature is found if one latent's decoder has a cosine of at least .9 with it in both models. An own feature
has a latent if one has such a cosine in its model; it is found if such a latent is also called that model's own, in one
of two ways: by norms, as its decoder in the other model is at most a tenth as long, or by its verdict
(`aligners.similarity.latents`) on held-out rows, without a same-model control. An own latent is false if it has such a
cosine with none of its model's own features. Training is that of `train.py fit` on rows in memory. Each number of steps
is a run of its own, with the whole course of the learning rate, so that several are a curve by rows seen. "k found" is
the mean number of active latents on held-out rows.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from itertools import chain, product
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
from aligners.similarity.latents.examination import examine
from aligners.similarity.latents.verdicts import X, Y, verdicts
from benchmarks.harness import Figures, parser

OWN = 10  # every tenth feature is X's own, and every tenth Y's
COSINE = 0.9
ABSENT = 0.1
RATE = 1e-2  # the default of `train.py fit`
A_TEXT = 8  # held-out rows, which are independent, stand for a text


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


class Matched:
    """Which latents have the direction of which planted feature.

    Args:
        features: n of them.
        decoders: of X and of Y, (m, d_x) and (m, d_y), in the scale of states divided by theirs.
    """

    def __init__(self, features: Planted, decoders: tuple[Tensor, Tensor]) -> None:
        near_x = _cosines(features.of_x, decoders[0]) >= COSINE
        near_y = _cosines(features.of_y, decoders[1]) >= COSINE
        in_x = features.of_x.norm(dim=1) > 0
        in_y = features.of_y.norm(dim=1) > 0
        both = (near_x & near_y)[in_x & in_y]
        self.shared = float(both.any(1).double().mean())
        self._of_x = near_x[in_x & ~in_y]
        self._of_y = near_y[in_y & ~in_x]

    def with_latents(self) -> float:
        """The share of own features that have a latent."""
        everything = torch.ones(self._of_x.shape[1], dtype=torch.bool)
        return self.found(everything, everything)

    def found(self, own_x: Tensor, own_y: Tensor) -> float:
        """The share of own features that are found, given which latents (m,) are called X's own, and which Y's."""
        of_x = (self._of_x & own_x).any(1)
        of_y = (self._of_y & own_y).any(1)
        return float(torch.cat([of_x, of_y]).double().mean())

    def false(self, own_x: Tensor, own_y: Tensor) -> float:
        """The share of such latents that are false; 0 of none."""
        false_x = own_x & ~self._of_x.any(0)
        false_y = own_y & ~self._of_y.any(0)
        false = int(false_x.sum() + false_y.sum())
        called = int(own_x.sum() + own_y.sum())
        return false / max(called, 1)


def _cosines(directions: Tensor, decoder: Tensor) -> Tensor:
    unit = torch.nn.functional.normalize(decoder, dim=1)
    return directions @ unit.T


def own_by_norms(decoders: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Which latents (m,) have a decoder in X alone, and which in Y alone."""
    norm_x = decoders[0].norm(dim=1)
    norm_y = decoders[1].norm(dim=1)
    return norm_y < ABSENT * norm_x, norm_x < ABSENT * norm_y


def own_by_verdict(
    aligner: SparseAligner, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Which latents (m,) are called X's own, and which Y's, on rows that training did not see."""
    text = torch.arange(x.shape[1]) // A_TEXT
    found = examine(aligner.paired(), aligner.codes(x, y), x, y, text)
    (verdict,) = verdicts(found.parts, permuted=[found.permuted]).verdict
    return verdict == X, verdict == Y


def train(
    aligner: SparseAligner,
    features: Planted,
    options: Namespace,
    rate: float,
    steps: int,
    seed: int,
) -> float:
    """Train a crosscoder on rows of the features, and return the seconds of a step."""
    x, y = features.rows(options.rows, seed + 100)
    aligner.fit(moments_of(x, y))

    def adam(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0, fused=True)

    module = Alignment(optimizer=adam)
    began = time.perf_counter()
    module.train_on_rows(aligner, x, y, steps, options.a_step, seed)
    seconds = time.perf_counter() - began
    aligner.eval().requires_grad_(False)
    return seconds / steps


def measure(
    aligner: SparseAligner, x: Tensor, y: Tensor
) -> Iterator[tuple[str, float]]:
    """Yield what a crosscoder leaves of held-out rows, and how many of its latents fire."""
    errors = aligner.reconstruction_errors(x, y)
    yield "FVU", float(errors.mean())
    fired = (aligner.codes(x, y) > 0)[0]
    yield "k found", float(fired.double().sum(1).mean())
    dead = aligner.crosscoder.dead()
    yield "dead", float(dead.double().mean())
    silent = ~fired.any(0)
    yield "silent on held-out rows", float(silent.double().mean())


def compare(
    features: Planted, aligner: SparseAligner, x: Tensor, y: Tensor
) -> Iterator[tuple[str, float]]:
    """Yield which features a crosscoder has, and which latents are falsely called own."""
    crosscoder = aligner.crosscoder
    decoders = crosscoder.decoder(0)[0], crosscoder.decoder(1)[0]
    matched = Matched(features, decoders)
    yield "shared found", matched.shared
    yield "own with a latent", matched.with_latents()
    by_norms = own_by_norms(decoders)
    by_verdict = own_by_verdict(aligner, x, y)
    for way, own in (("norms", by_norms), ("verdict", by_verdict)):
        yield f"own found by {way}", matched.found(*own)
        yield f"false among own by {way}", matched.false(*own)


def parsed() -> Namespace:
    """The options of this run."""
    arguments = parser(__doc__)
    several: dict[str, tuple[type, list[Any]]] = {
        "widths": (int, [64, 384]),
        "seeds": (int, [0, 1]),
        "active": (int, [8]),
        "penalties": (float, [None]),
        "auxiliary": (float, [1 / 32]),
        "dead_after": (int, [None]),
        "rates": (float, [RATE]),
        "steps": (int, [1000]),
    }
    for name, (kind, default) in several.items():
        arguments.add_argument(f"--{name}", type=kind, nargs="*", default=default)
    one = {
        "features": (4.0, "by width"),
        "expansion": (8.0, "latents by width"),
        "present": (8.0, "features a row"),
        "noise": (0.2, "norm of a row's"),
        "own": (0.0, "share of latents that each model has for itself"),
        "a_step": (512, "rows a step"),
        "rows": (50_000, "drawn"),
        "held_out": (8192, "rows that are not trained on"),
        "selection": ("batch_topk", "of latents"),
    }
    for name, (value, about) in one.items():
        arguments.add_argument(f"--{name}", type=type(value), default=value, help=about)
    return arguments.parse_args()


def choices(options: Namespace) -> Iterator[tuple[str, dict[str, Any], float, int]]:
    """Yield a name, the options of the dictionary, the learning rate and the steps of each run at a width."""
    selection = options.selection
    for active, penalty, auxiliary, dead_after, rate, steps in product(
        options.active,
        options.penalties,
        options.auxiliary,
        options.dead_after,
        options.rates,
        options.steps,
    ):
        name = "L1"
        if selection == "batch_topk":
            name = f"k {active}"
        if penalty is not None:
            name += f", penalty {penalty:g}"
        if dead_after is not None:
            name += f", dead after {dead_after}"
        name += f", rate {rate:g}, auxiliary {auxiliary:g}"
        name += f", {steps * options.a_step:,} rows seen"
        dictionary = {
            "active": active,
            "selection": selection,
            "penalty": penalty,
            "own": options.own,
            "auxiliary": auxiliary,
            "dead_after": dead_after,
        }
        yield name, dictionary, rate, steps


def main() -> None:
    """Run the benchmark."""
    options = parsed()
    torch.set_num_threads(options.threads)
    figures = Figures(options.device)
    for width, seed in product(options.widths, options.seeds):
        number = round(options.features * width)
        features = planted(width, width, number, options.present, options.noise, seed)
        x, y = features.rows(options.held_out, seed + 200)
        latents = round(options.expansion * width)
        for name, dictionary, rate, steps in choices(options):
            torch.manual_seed(seed)
            aligner = SparseAligner(1, width, width, latents=latents, **dictionary)
            seconds = train(aligner, features, options, rate, steps, seed)
            name = f"d {width}, seed {seed}, {name}"
            found = compare(features, aligner, x, y)
            for what, value in chain(found, measure(aligner, x, y)):
                figures.add(f"{name}: {what}", value)
            figures.add(f"{name}: seconds a step", seconds)
    figures.write(options.json)


if __name__ == "__main__":
    main()
