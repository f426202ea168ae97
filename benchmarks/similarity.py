"""Similarity of all layer pairs: minibatch CKA against torch_cka, measures on moments against pair by pair, memory.

minibatch: unbiased minibatch CKA of 12 x 12 layers, against the package `torch_cka` on the same two modules and batches
of rows. Both compute one definition, and what it exports agrees with ours as long as the rows' mean is zero. It does
not centre, and in float32 loses digits to a mean's square: the second comparison moves the rows by 5, about four
deviations, which changes no CKA (by 10 it ends in NaN). It also computes HSIC(L, L) anew for every layer of X, hence
its time. "matrix products" are the Gram matrices of all layers in full and the product of all pairs, into memory that
is already there; "own products" are the ones that ours needs, which leaves out what symmetry gives.

pairs: CKA, SVCCA, PWCCA, neuronsim and mixedsim of 13 x 13 layers, the last three in both directions, against
functions of one pair on full matrices, in float32, as the code released with Wu et al. 2020 has it: two thin SVDs of
every layer, one for CCA and one for regression, kept for all pairs, which is what the bar is set against. "nothing
kept" decomposes anew in every measure.
Both are timed on the first layers of each model and scaled to all layers and pairs. Ours is one pass over the stream
of rows, in float64, and the measures. On a CPU these are seconds of processor time.

memory: peak memory of a process that streams rows through the accumulators, ten times as many rows against as many.

rates, on a GPU: minibatch CKA of bfloat16 rows, 13 x 13 layers of width 768, as share of the rate of large float32
products, and moments as share of the float64 rate.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.similarity.algebra.grid import GridSums
from aligners.similarity.algebra.moments import GridMoments
from aligners.similarity.algebra.pairs import upper_blocks
from aligners.similarity.catalogue import catalogue
from aligners.similarity.functional.cca import SharedMoments
from aligners.similarity.functional.cka import (
    HSIC,
    cka_from_hsic,
    minibatch_cka,
    unbiased_hsic,
)
from aligners.similarity.outcome import evaluate
from benchmarks.harness import Figures, interleaved, parser, ratio

SHARE = 0.99  # of the variance that SVCCA and PWCCA keep
TIMED = 2  # layers of each model on which the per-pair functions are timed


def related(layers: int, rows: int, width: int, device: str) -> tuple[Tensor, Tensor]:
    """Paired rows of mean zero whose features have unequal deviations: every layer of Y a noisy map of X's."""
    draw = torch.Generator().manual_seed(0)
    scale = torch.linspace(2, 0.2, width)
    x = torch.randn(layers, rows, width, generator=draw) * scale
    maps = torch.randn(layers, width, width, generator=draw) / width**0.5
    y = x @ maps + torch.randn(layers, rows, width, generator=draw) * scale
    return x.to(device), y.to(device)


class Recorded(nn.Module):
    """A network whose layers give rows that were computed before.

    Args:
        states: (L, N, d) what its layers give for inputs 0..N-1.
    """

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(rows) for rows in states)

    def forward(self, index: Tensor) -> list[Tensor]:
        """States of all layers for inputs (B,)."""
        return [layer(index) for layer in self.layers]


class _Layer(nn.Module):
    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, index: Tensor) -> Tensor:
        return self.rows[index]


def by_torch_cka(x: Recorded, y: Recorded, loader: DataLoader, device: str) -> Tensor:
    """What `torch_cka` exports, (L_x, L_y)."""
    names = [f"layers.{layer}" for layer in range(len(x.layers))]
    compared = import_module("torch_cka").CKA(x, y, "x", "y", names, names, device)
    compared.compare(loader, loader)
    for layer in (*x.layers, *y.layers):
        layer._forward_hooks.clear()  # which it leaves behind
    return compared.export()["CKA"]


class Batches:
    """Sums of HSICs over batches, as a pass of `evaluate.py similarity` keeps them."""

    def __init__(self, layers: int, device: str) -> None:
        self.sums = HSIC.zeros(layers, layers, device)

    def update(self, x: Tensor, y: Tensor) -> None:
        """Add a batch, (L_x, N, d_x) and (L_y, N, d_y)."""
        self.sums = HSIC(
            *(
                one + more
                for one, more in zip(self.sums, unbiased_hsic(x, y), strict=True)
            )
        )


def by_batches(x: Recorded, y: Recorded, loader: DataLoader, device: str) -> Tensor:
    """Ours over the same modules and loader."""
    batches = Batches(len(x.layers), device)
    for (index,) in loader:
        batches.update(
            torch.stack(x(index.to(device))), torch.stack(y(index.to(device)))
        )
    return cka_from_hsic(batches.sums)


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a.cpu() - b.cpu()).abs().max())  # torch_cka's are on the CPU


def gram_products(x: Tensor, y: Tensor) -> Callable[[], None]:
    """All Gram matrices in full, and the product of all pairs: x (L_x, N, d_x), y (L_y, N, d_y)."""
    grams_x = torch.empty(len(x), x.shape[1], x.shape[1], device=x.device)
    grams_y = torch.empty(len(y), y.shape[1], y.shape[1], device=y.device)

    def run() -> None:
        torch.bmm(x, x.mT, out=grams_x)
        torch.bmm(y, y.mT, out=grams_y)
        grams_x.flatten(1) @ grams_y.flatten(1).mT

    return run


def own_products(x: Tensor, y: Tensor) -> Callable[[], None]:
    """The products that `unbiased_hsic` takes of one batch, and nothing between them."""
    blocks = upper_blocks(x.shape[1], x.device)
    size = blocks[0][0].stop
    pairs = [
        torch.rand(len(rows), size * size, device=x.device, dtype=torch.float64)
        for rows in (x, y)
    ]

    def run() -> None:
        for i, j in blocks:
            x[:, i] @ x[:, j].mT
            y[:, i] @ y[:, j].mT
            pairs[0] @ pairs[1].mT

    return run


def minibatch(
    figures: Figures, layers: int, width: int, batch: int, rounds: int, device: str
) -> None:
    """Ours against `torch_cka` and the floor."""
    x, y = related(layers, 2 * batch, width, device)
    models = Recorded(x), Recorded(y)
    whole, first = (
        DataLoader(TensorDataset(torch.arange(rows)), batch_size=batch)
        for rows in (2 * batch, batch)
    )
    batches, a, b = (
        Batches(layers, device),
        x[:, :batch].contiguous(),
        y[:, :batch].contiguous(),
    )
    runs: dict[str, Callable[[], object]] = {
        "minibatch CKA": lambda: by_batches(*models, first, device),
        "minibatch CKA, update": lambda: batches.update(a, b),
        "matrix products": gram_products(a, b),
        "own products": own_products(a, b),
    }
    exact = minibatch_cka(x.double(), y.double(), batch)
    figures.add(
        "minibatch CKA, difference from float64",
        _difference(by_batches(*models, whole, device), exact),
        bar=1e-5,
    )
    if find_spec("torch_cka"):
        figures.add(
            "torch_cka, difference from float64",
            _difference(by_torch_cka(*models, whole, device), exact),
            bar=1e-5,
        )
        far, exact = (Recorded(x[:2] + 5), Recorded(y[:2] + 5)), exact[:2, :2]
        figures.add(
            "minibatch CKA, the same at a mean of 5",
            _difference(by_batches(*far, whole, device), exact),
        )
        figures.add(
            "torch_cka, the same at a mean of 5",
            _difference(by_torch_cka(*far, whole, device), exact),
        )
        runs["torch_cka"] = lambda: by_torch_cka(*models, first, device)
    else:
        print("torch_cka is not installed: left out")
    seconds = interleaved(runs, rounds=rounds, device=device, warmup=1)
    figures.add_times(seconds)
    if "torch_cka" in seconds:
        figures.add(
            "torch_cka / minibatch CKA",
            ratio(seconds, "torch_cka", "minibatch CKA"),
            bar=10,
            sense=">=",
        )
    update = "minibatch CKA, update"
    figures.add(
        f"{update} / matrix products",
        ratio(seconds, update, "matrix products"),
        bar=1.3,
    )
    figures.add(f"{update} / own products", ratio(seconds, update, "own products"))


class Layer:
    """One layer's rows, centred, and the thin SVDs that its measures ask for.

    Args:
        rows: (n, d).
        keep: decompose once instead of anew whenever asked.
    """

    def __init__(self, rows: Tensor, keep: bool) -> None:
        self.rows = rows - rows.mean(0)
        self.lengths = self.rows.norm(dim=0)
        self._kept = (
            {scaled: self._svd(scaled) for scaled in (False, True)} if keep else {}
        )

    def svd(self, scaled: bool) -> tuple[Tensor, Tensor]:
        """Left singular vectors (n, d) and singular values (d,) of the rows, or of rows with features of length 1."""
        return self._kept[scaled] if self._kept else self._svd(scaled)

    def components(self) -> Tensor:
        """The left singular vectors that carry `SHARE` of the variance."""
        u, s = self.svd(scaled=False)
        carried = s.square().cumsum(0) / s.square().sum()
        return u[:, : int((carried < SHARE).sum()) + 1]

    def _svd(self, scaled: bool) -> tuple[Tensor, Tensor]:
        u, s, _ = torch.linalg.svd(
            self.rows / self.lengths if scaled else self.rows, full_matrices=False
        )
        return u, s


def pair_by_pair(x: Layer, y: Layer) -> dict[str, float]:
    """The measures of one pair, each by itself, as the papers' code computes them."""
    return {
        "cka": _cka(x, y),
        **_svcca(x, y),
        **_pwcca(x, y),
        **_neuronsim(x, y),
        **_mixedsim(x, y),
    }


def _cka(x: Layer, y: Layer) -> float:
    a, b = x.rows, y.rows
    own = torch.linalg.norm(a.T @ a) * torch.linalg.norm(b.T @ b)
    return float(torch.linalg.norm(b.T @ a).square() / own)


def _svcca(x: Layer, y: Layer) -> dict[str, float]:
    return {
        "svcca": float(torch.linalg.svdvals(x.components().T @ y.components()).mean())
    }


def _pwcca(x: Layer, y: Layer) -> dict[str, float]:
    in_x, in_y = x.components(), y.components()
    u, rho, vt = torch.linalg.svd(in_x.T @ in_y, full_matrices=False)
    found = {}
    for name, layer, variables in (
        ("pwcca", x, in_x @ u),
        ("pwcca back", y, in_y @ vt.T),
    ):
        weight = (variables.T @ layer.rows).abs().sum(1)
        found[name] = float((weight * rho).sum() / weight.sum())
    return found


def _neuronsim(x: Layer, y: Layer) -> dict[str, float]:
    correlation = (x.rows.T @ y.rows / torch.outer(x.lengths, y.lengths)).abs()
    return {
        "neuronsim": float(correlation.amax(1).mean()),
        "neuronsim back": float(correlation.amax(0).mean()),
    }


def _mixedsim(x: Layer, y: Layer) -> dict[str, float]:
    found = {}
    for name, of, on in (("mixedsim", x, y), ("mixedsim back", y, x)):
        predicted = on.svd(scaled=True)[0].T @ of.rows
        found[name] = float((predicted.norm(dim=0) / of.lengths).mean())
    return found


def measures(moments: GridMoments) -> dict[str, Tensor]:
    """The same of all pairs, (L_x, L_y) each, from moments."""
    shared, found = SharedMoments(moments), dict[str, Tensor]()
    for name in ("cka", "pwcca", "svcca", "neuronsim", "mixedsim"):
        there, *back = evaluate(catalogue(SHARE)[name], shared).values()
        found |= {name: there, **{f"{name} back": grid for grid in back}}
    return found


def pairs(
    figures: Figures, layers: int, width: int, rows: int, rounds: int, device: str
) -> None:
    """Measures on moments against pair by pair."""
    x, y = related(layers, rows, width, device)
    timed = min(TIMED, layers)

    def ours(products: torch.dtype = torch.float64) -> dict[str, Tensor]:
        sums = GridSums.zeros(layers, width, layers, width, device)
        for a, b in zip(x.split(1024, 1), y.split(1024, 1), strict=True):
            sums.add_(a, b, products)
        return measures(sums.moments())

    def kept() -> list[list[Layer]]:
        return [[Layer(layer, keep=True) for layer in side[:timed]] for side in (x, y)]

    prepared = kept()
    plain = [Layer(side[0], keep=False) for side in (x, y)]
    runs: dict[str, Callable[[], object]] = {
        "from moments": ours,
        "from moments, float32 products": lambda: ours(torch.float32),
        f"SVDs of {2 * timed} layers": kept,
        f"{timed**2} pairs": lambda: [
            pair_by_pair(a, b) for a in prepared[0] for b in prepared[1]
        ],
        "1 pair, nothing kept": lambda: pair_by_pair(*plain),
    }
    for products in (torch.float64, torch.float32):
        found = ours(products)
        differences = [
            abs(float(found[name][i, j]) - value)
            for i, a in enumerate(prepared[0])
            for j, b in enumerate(prepared[1])
            for name, value in pair_by_pair(a, b).items()
        ]
        of = "" if products == torch.float64 else ", float32 products"
        figures.add(
            f"from moments{of}, difference from pair by pair",
            max(differences),
            bar=1e-4,
        )
    clock = time.process_time if device == "cpu" else time.perf_counter
    seconds = interleaved(runs, rounds=rounds, device=device, warmup=0, clock=clock)
    of_layers, of_pairs, of_one = (seconds[name] for name in list(runs)[2:])
    seconds["pair by pair, scaled"] = [
        svds * layers / timed + values * (layers / timed) ** 2
        for svds, values in zip(of_layers, of_pairs, strict=True)
    ]
    seconds["pair by pair, nothing kept, scaled"] = [
        value * layers**2 for value in of_one
    ]
    figures.add_times(seconds)
    kept_scaled, anew_scaled = (
        "pair by pair, scaled",
        "pair by pair, nothing kept, scaled",
    )
    figures.add(
        f"{kept_scaled} / from moments",
        ratio(seconds, kept_scaled, "from moments"),
        bar=5,
        sense=">=",
    )
    single = "from moments, float32 products"
    figures.add(
        f"{kept_scaled} / {single}",
        ratio(seconds, kept_scaled, single),
        bar=5,
        sense=">=",
    )
    figures.add(
        f"{anew_scaled} / from moments", ratio(seconds, anew_scaled, "from moments")
    )


def stream(layers: int, width: int, rows: int) -> None:
    """Stream rows through all accumulators, and print the peak memory of this process in MB."""
    draw = torch.Generator().manual_seed(0)
    moments, batches = (
        GridSums.zeros(layers, width, layers, width),
        Batches(layers, "cpu"),
    )
    for _ in range(0, rows, 1000):
        x, y = torch.randn(2, layers, 1000, width, generator=draw)
        moments.add_(x, y)
        batches.update(x, y)
    cka_from_hsic(batches.sums)
    measures(moments.moments())
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def memory(figures: Figures, layers: int, width: int, rows: int, threads: int) -> None:
    """Peak memory for `rows` rows, and for ten times as many."""
    peaks = []
    for streamed in (rows, 10 * rows):
        command = [sys.executable, __file__, "--stream", str(streamed)]
        sizes = [
            "--layers",
            str(layers),
            "--width",
            str(width),
            "--threads",
            str(threads),
            "--device",
            "cpu",
        ]
        peaks.append(
            float(
                subprocess.run(
                    [*command, *sizes], check=True, capture_output=True, text=True
                ).stdout
            )
        )
        figures.add(f"peak memory of {streamed} rows, MB", peaks[-1])
    figures.add(
        "peak memory, ten times the rows / the rows", peaks[1] / peaks[0], bar=1.05
    )


def rates(
    figures: Figures,
    layers: int,
    width: int,
    batch: int,
    rounds: int,
    device: str,
    side: int = 8192,
) -> None:
    """Minibatch CKA and moments as shares of what the machine's matrix products, of this side, reach."""
    x, y = (rows.bfloat16() for rows in related(layers, batch, width, device))
    cka, moments = (
        Batches(layers, device),
        GridSums.zeros(layers, width, layers, width, device),
    )
    large = {
        dtype: torch.randn(2, side, side, device=device, dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    }
    runs: dict[str, Callable[[], object]] = {
        "minibatch CKA of bfloat16": lambda: cka.update(x, y),
        "moments of bfloat16": lambda: moments.add_(x, y),
        f"{side} x {side} in float32": lambda: (
            large[torch.float32][0] @ large[torch.float32][1]
        ),
        f"{side} x {side} in float64": lambda: (
            large[torch.float64][0] @ large[torch.float64][1]
        ),
    }
    seconds = interleaved(runs, rounds=rounds, device=device)
    figures.add_times(seconds)
    grams = sum(
        (i.stop - i.start) * (j.stop - j.start) for i, j in upper_blocks(batch, device)
    )
    flops = {
        "minibatch CKA of bfloat16": (
            2.0 * grams * 2 * layers * width,
            f"{side} x {side} in float32",
        ),
        "moments of bfloat16": (
            2.0 * batch * width**2 * (layers**2 + 2 * layers),
            f"{side} x {side} in float64",
        ),
    }
    for name, (work, reference) in flops.items():
        share = work / (2.0 * side**3) / ratio(seconds, name, reference)
        figures.add(f"{name}, share of the rate", share)


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--parts",
        nargs="+",
        default=["memory", "minibatch", "pairs"],
        help="and rates, on a GPU",
    )
    arguments.add_argument(
        "--layers",
        type=int,
        help="12 for minibatch, 13 for pairs and rates, 6 for memory",
    )
    arguments.add_argument(
        "--width",
        type=int,
        help="768 for minibatch and rates, 256 for pairs, 128 for memory",
    )
    arguments.add_argument("--batch", type=int, default=1024)
    arguments.add_argument("--rows", type=int, default=20_000)
    arguments.add_argument(
        "--stream",
        type=int,
        metavar="ROWS",
        help="stream rows and print the peak memory",
    )
    arguments.set_defaults(rounds=3)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    if options.stream:
        stream(options.layers, options.width, options.stream)
        return

    def size(layers: int, width: int) -> tuple[int, int]:
        return options.layers or layers, options.width or width

    figures = Figures(options.device)
    if (
        "memory" in options.parts
    ):  # first: a new process begins with the peak of the one that started it
        memory(figures, *size(6, 128), options.rows, options.threads)
    if "minibatch" in options.parts:
        minibatch(
            figures, *size(12, 768), options.batch, options.rounds, options.device
        )
    if "pairs" in options.parts:
        pairs(figures, *size(13, 256), options.rows, options.rounds, options.device)
    if torch.device(options.device).type == "cuda":
        rates(figures, *size(13, 768), options.batch, options.rounds, options.device)
    figures.write(options.json)


if __name__ == "__main__":
    main()
