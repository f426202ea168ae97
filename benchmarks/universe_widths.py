"""Does a universe train at every width? Random BERTs of several widths and seeds, the defaults of `train.py universe`.

    python -m benchmarks.universe_widths --json universe_widths.json

Rows are those of `benchmarks.widths`: BERTs of random weights, 2 blocks, read on the embedded sentences at block 2, a
tenth of the texts held out. FVU is the mean over all directions, at the start and after the last step.
"""

import torch
from torch import Tensor

from aligners.fitting.universe.joint import paired_rows
from aligners.fitting.universe.universe import Universe
from aligners.fitting.universe.universe_alignment import UniverseAlignment
from aligners.similarity.algebra.moments import moments_of
from benchmarks.harness import Figures, parser
from benchmarks.widths import states_of_random_models


def main() -> None:
    """Train a universe at each width and seed."""
    arguments = parser(__doc__)
    arguments.add_argument("--widths", type=int, nargs="*", default=[64, 384, 768])
    arguments.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    arguments.add_argument("--models", type=int, default=3)
    arguments.add_argument("--texts", type=int, default=1_500)
    arguments.add_argument("--rows", type=int, default=256, help="rows a step")
    arguments.add_argument("--steps", type=int, default=100)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    figures = Figures(options.device)
    for width in options.widths:
        for seed in options.seeds:
            states = states_of_random_models(
                width, seed, options.models, options.texts
            ).to(options.device)
            train(
                figures,
                f"{options.models} BERTs of width {width}, seed {seed}",
                states,
                options.steps,
                options.rows,
            )
            figures.write(options.json)


def train(figures: Figures, name: str, states: Tensor, steps: int, rows: int) -> None:
    """Train a universe on states (k, n, d), and add its figures."""
    models, n, width = states.shape
    fitted, held_out = states.split([9 * n // 10, n - 9 * n // 10], 1)
    module = UniverseAlignment()
    universe = module.universe(models, [width] * models).to(states.device)
    universe.fit(moments_of(*paired_rows(fitted, models)))
    mean = fitted.mean(1, keepdim=True)
    start = _fvu(universe, held_out, mean)
    figures.add(f"{name}: start, FVU", start)
    diverged = module.train_on_rows(universe, fitted, fitted, steps, rows, module.seed)
    figures.add(
        f"{name}: {steps} steps, FVU", _fvu(universe, held_out, mean), bar=start
    )
    figures.add(f"{name}: diverged at step", int(diverged.max()), bar=0)


@torch.no_grad()
def _fvu(universe: Universe, states: Tensor, mean: Tensor) -> float:
    """Mean over all directions."""
    embedded, total = universe.embed(states), (states - mean).square().sum((1, 2))
    errors = [
        (universe.predicted(embedded, shift) - states)
        for shift in range(1, universe.models)
    ]
    return float(
        torch.stack([error.square().sum((1, 2)) / total for error in errors]).mean()
    )


if __name__ == "__main__":
    main()
