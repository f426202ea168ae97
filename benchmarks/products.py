"""What do products in tf32 cost? The errors of a default fit beside those in float32, and beside another seed.

    python -m benchmarks.products embedded-gpt:0 embedded-gpt:1 --site_x 2 --site_y 2
    python -m benchmarks.products FOLDER/minilm FOLDER/e5 --site_x 3 --site_y 6 --steps 200

A fit of width 768 takes most of an hour on a core: `--seeds` and `--products` take one fit at a time.

The invertible network is fitted as `train.py fit` does, in float32 and in tf32, with two seeds each, and measured as
`evaluate.py inject` does, in float32: FVU, FVU on token types that were not fitted, FVU of the inverse, round trip, and
the penalty where the second model has a head. "tf32 / float32" is the mean over seeds of one over that of the other.
"seeds" is the larger of the two seeds over the smaller, in float32: a cost below it is within what a seed makes. A
penalty may be negative, where mapped states serve a head better than its own; then differences stand for ratios.

On a GPU the products are in tf32. A CPU has none, so they are imitated there: the operands of every product of float32
matrices are rounded to 10 bits of mantissa, to nearest, in the backward pass too, and sums stay float32.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning import Trainer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners import Alignment, InjectionEvaluation, TextSource, pair_states
from aligners.fitting import alignment
from aligners.maps import matrices
from aligners.maps.inn import INN
from aligners.maps.matrices import ProductPrecision, has_tf32
from benchmarks.harness import Figures, parser

aten = torch.ops.aten
# each kind of product, and where its two operands begin: what stands before them is added
PRODUCTS = {
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
}
LOST = 13  # bits of the 23 of float32's mantissa that tf32 does not have
FIGURES = ("fvu", "fvu_unseen", "fvu_inverse", "round_trip", "penalty")
PRECISIONS: tuple[ProductPrecision, ...] = ("float32", "tf32")


def rounded(x: Tensor) -> Tensor:
    """A float32 tensor with the mantissas of tf32, rounded to nearest, ties away from zero."""
    bits = x.contiguous().view(torch.int32)
    half = 1 << (LOST - 1)
    mask = -(1 << LOST)
    return ((bits + half) & mask).view(torch.float32)


class ImitatedTf32(TorchDispatchMode):
    """Within it, products of float32 matrices round their operands as tf32 does."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        first = PRODUCTS.get(func)
        if first is not None and args[first].dtype == torch.float32:
            left, right, *others = args[first:]
            args = (*args[:first], rounded(left), rounded(right), *others)
        return func(*args, **(kwargs or {}))


@contextmanager
def imitated(precision: ProductPrecision) -> Iterator[None]:
    """In place of `products_in` on a CPU."""
    with ImitatedTf32() if precision == "tf32" else nullcontext():
        yield


@contextmanager
def imitating() -> Iterator[None]:
    """Within it, a fit on a CPU takes tf32, and imitates it."""
    with (
        mock.patch.object(alignment, "products_in", imitated),
        mock.patch.object(matrices, "has_tf32", return_value=True),
    ):
        yield


def trainer(options: argparse.Namespace, **limits: Any) -> Trainer:
    """A Trainer that writes nothing."""
    return Trainer(
        accelerator="gpu" if options.device.startswith("cuda") else "cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **limits,
    )


def errors(
    options: argparse.Namespace, precision: ProductPrecision, seed: int
) -> dict[str, float]:
    """Fit and measure the map."""
    data = pair_states(
        options.model_x,
        options.model_y,
        sites=[f"{options.site_x}:{options.site_y}"],
        text=TextSource(max_texts=options.texts, max_held_out=options.held_out),
        batch_size=options.batch,
    )
    fit = Alignment({"inn": INN}, products=precision, seed=seed)
    native = has_tf32(torch.device(options.device))
    with nullcontext() if native else imitating():
        trainer(options, max_steps=options.steps).fit(fit, data)
    evaluation = InjectionEvaluation(fit, closed_form=[])
    trainer(options).test(evaluation, data, verbose=False)
    for row in evaluation.rows:
        if row["method"] == "inn":
            return {name: row[name] for name in FIGURES if row.get(name) is not None}
    raise RuntimeError("The evaluation has no row of the network.")


def compare(
    figures: Figures, name: str, exact: Sequence[float], coarse: Sequence[float]
) -> None:
    """Add how much the precision changes a figure, beside how much the seed does.

    Args:
        figures: to add to.
        name: of the figure.
        exact: it in float32, by seed.
        coarse: it in tf32.
    """
    of_exact = statistics.mean(exact)
    of_coarse = statistics.mean(coarse)
    least = min(exact)
    if least > 0:
        spread = max(exact) / least
        figures.add(f"{name}: seeds", spread)
        figures.add(f"{name}: tf32 / float32", of_coarse / of_exact, bar=spread)
        return
    spread = max(exact) - least
    figures.add(f"{name}: seeds differ by", spread)
    figures.add(f"{name}: tf32 − float32", of_coarse - of_exact, bar=spread)


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("model_x")
    arguments.add_argument("model_y")
    arguments.add_argument("--site_x", type=int, default=1)
    arguments.add_argument("--site_y", type=int, default=1)
    arguments.add_argument("--steps", type=int, default=450)
    arguments.add_argument("--batch", type=int, default=32, help="texts a step")
    arguments.add_argument("--texts", type=int, help="to fit on; default: all")
    arguments.add_argument("--held_out", type=int, help="texts; default: all")
    arguments.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1], help="of the fits"
    )
    arguments.add_argument(
        "--products", choices=PRECISIONS, nargs="+", default=PRECISIONS
    )
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    figures = Figures(options.device)

    found: dict[ProductPrecision, list[dict[str, float]]]
    found = {precision: [] for precision in options.products}
    for seed in options.seeds:
        for precision, results in found.items():
            result = errors(options, precision, seed)
            results.append(result)
            for name, value in result.items():
                figures.add(f"{precision}, seed {seed}: {name}", value)

    if set(found) == set(PRECISIONS):
        for name in found["float32"][0]:
            exact = [result[name] for result in found["float32"]]
            coarse = [result[name] for result in found["tf32"]]
            compare(figures, name, exact, coarse)
    figures.write(options.json)
    sys.exit(bool(figures.missed))


if __name__ == "__main__":
    main()
