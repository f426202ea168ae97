"""How often a nominal 95 % interval holds the truth: jackknife over groups of texts, and bootstraps.

Texts of ten rows each, dependent within a text, from a known distribution; the truth is the measure on 100,000
texts. `aligners.similarity.controls.jackknife_interval` leaves one of ten groups of texts out at a time. The
bootstraps draw texts, or groups, with replacement and take percentiles. Not a timing: it prints shares of trials.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.similarity.algebra.grid import GridSums
from aligners.similarity.algebra.moments import GridMoments
from aligners.similarity.controls import jackknife_interval
from aligners.similarity.functional.cca import cca
from aligners.similarity.functional.cka import linear_cka, unbiased_cka
from benchmarks.harness import Figures, parser

ROWS, WIDTH, GROUPS = 10, 8, 10
MEASURES: dict[str, Callable[[GridMoments], Tensor]] = {
    "linear CKA": linear_cka,
    "unbiased CKA": unbiased_cka,
    "CCA": cca,
}
Interval = tuple[Tensor, Tensor]


def draw(texts: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Paired rows, (texts, ROWS, WIDTH) each: half of the variance belongs to the text."""

    def normal(rows: int) -> Tensor:
        return torch.randn(texts, rows, WIDTH, generator=generator, dtype=torch.float64)

    x = 0.7 * normal(1) + 0.7 * normal(ROWS)
    return x, 0.5 * x + 0.5 * normal(1) + 0.7 * normal(ROWS)


def measured(x: Tensor, y: Tensor) -> Tensor:
    """Every measure on these texts, (measures,)."""
    sums = GridSums.zeros(1, WIDTH, 1, WIDTH).add_(
        x.reshape(1, -1, WIDTH), y.reshape(1, -1, WIDTH)
    )
    moments = sums.moments()
    return torch.stack([measure(moments)[0, 0] for measure in MEASURES.values()])


def bootstrap(
    x: Tensor,
    y: Tensor,
    units: list[Tensor],
    resamples: int,
    generator: torch.Generator,
) -> Interval:
    """Percentiles over resamples of the units (texts, or groups of them), drawn with replacement."""
    drawn = torch.randint(len(units), (resamples, len(units)), generator=generator)
    chosen = [torch.cat([units[i] for i in row]) for row in drawn.tolist()]
    values = torch.stack([measured(x[texts], y[texts]) for texts in chosen])
    low, high = torch.quantile(
        values, torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0
    )
    return low, high


def jackknife(x: Tensor, y: Tensor, units: list[Tensor]) -> Interval:
    """What the reports show."""
    rest = [torch.cat(units[:g] + units[g + 1 :]) for g in range(len(units))]
    return jackknife_interval(
        measured(x, y), torch.stack([measured(x[texts], y[texts]) for texts in rest])
    )


def main() -> None:
    """Run the simulation."""
    arguments = parser(__doc__)
    arguments.add_argument("--texts", type=int, default=60, help="texts of a trial")
    arguments.add_argument("--trials", type=int, default=100)
    arguments.add_argument("--resamples", type=int, default=100, help="of a bootstrap")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    truth = measured(*draw(100_000, generator))
    every = torch.arange(options.texts)
    texts, groups = list(every[:, None]), [every[g::GROUPS] for g in range(GROUPS)]
    held: dict[str, Tensor] = {}
    for _ in range(options.trials):
        x, y = draw(options.texts, generator)
        intervals = {
            "jackknife over groups": jackknife(x, y, groups),
            "bootstrap over groups": bootstrap(
                x, y, groups, options.resamples, generator
            ),
            "bootstrap over texts": bootstrap(
                x, y, texts, options.resamples, generator
            ),
        }
        for kind, (low, high) in intervals.items():
            held[kind] = held.get(kind, torch.zeros(len(MEASURES))) + (
                (low <= truth) & (truth <= high)
            )
    figures = Figures(options.device)
    for place, name in enumerate(MEASURES):
        for kind, count in held.items():
            figures.add(f"{name}: {kind}, held", float(count[place]) / options.trials)
    figures.write(options.json)


if __name__ == "__main__":
    main()
