"""How much training does a sparse autoencoder save that begins as one carried from another model?

    python -m benchmarks.carried_start X Y --site 2 --json FILE

An autoencoder of X's states is trained, and carried to Y by `Dictionary.carried`, through ridge maps both ways that are
fitted on the same paired rows. Autoencoders of Y's states are then trained from drawn directions, as `train.py fit`
does, and from the carried one, for each number of steps with the whole course of the learning rate. FVU is of held-out
rows. "Carried" alone is without any step. The saving is one less the steps that reach the FVU of the most steps from
drawn directions, between measured numbers of steps on a line in their logarithm, over the most steps.
"""

import math
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.fitting.alignment import Alignment
from aligners.maps.linear import Ridge
from aligners.maps.sparse.sparse_aligner import SparseAligner
from aligners.probing.artefacts.dictionaries import Dictionary
from aligners.probing.artefacts.sparse_dictionaries import dictionary_of, start_from
from aligners.similarity.algebra.moments import moments_of
from benchmarks.crosscoders import ROWS, both_halves, paired_texts
from benchmarks.harness import Figures, parser


class Settings(NamedTuple):
    """Of all autoencoders.

    Attributes:
        latents: m; active: k; rate: of AdamW.
    """

    latents: int
    active: int
    rate: float


def ready(settings: Settings, rows: Tensor, seed: int) -> SparseAligner:
    """An autoencoder of rows (1, N, d) that is to be trained."""
    torch.manual_seed(seed)
    width = rows.shape[2]
    aligner = SparseAligner(
        1, width, width, of="x", latents=settings.latents, active=settings.active
    )
    aligner.fit(moments_of(rows, rows))
    return aligner


def train(
    settings: Settings, aligner: SparseAligner, rows: Tensor, steps: int, seed: int
) -> SparseAligner:
    """Take the steps of `train.py fit`."""

    def adam(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters, lr=settings.rate, weight_decay=0.0, fused=True
        )

    if steps:
        module = Alignment(optimizer=adam)
        module.train_on_rows(aligner, rows, rows, steps, ROWS, seed)
    return aligner.eval().requires_grad_(False)


def error(aligner: SparseAligner, rows: Tensor) -> float:
    """FVU of the reconstruction."""
    return float(aligner.reconstruction_errors(rows, rows).mean())


def carried_over(dictionary: Dictionary, x: Tensor, y: Tensor) -> Dictionary:
    """The dictionary of X for Y, through ridge maps of paired rows."""
    back = Ridge(1, y.shape[2], x.shape[2])
    back.fit(moments_of(y, x))
    forward = Ridge(1, x.shape[2], y.shape[2])
    forward.fit(moments_of(x, y))
    return dictionary.carried(back, forward, model="y", site=dictionary.site)


def steps_to(wanted: float, errors: Mapping[int, float]) -> float:
    """The steps at which errors by steps (from 1 on) come down to one, or NaN if they never do."""
    before: tuple[int, float] | None = None
    for steps, found in errors.items():
        if found <= wanted:
            if before is None:
                return float(steps)
            first, above = before
            share = (above - wanted) / (above - found)
            return first * (steps / first) ** share
        before = (steps, found)
    return math.nan


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("model_x")
    arguments.add_argument("model_y")
    arguments.add_argument("--site", default="2", help="or a pair, as 3:6")
    arguments.add_argument("--texts", type=int, default=1200)
    arguments.add_argument("--expansion", type=int, default=8, help="of Y's width")
    arguments.add_argument("--active", type=int, default=16)
    arguments.add_argument("--rate", type=float, default=1e-2, help="of AdamW")
    arguments.add_argument("--training", type=int, default=800, help="steps on X")
    arguments.add_argument(
        "--steps", type=int, nargs="*", default=[25, 50, 100, 200, 400, 800]
    )
    arguments.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    figures = Figures(options.device)
    kept = Path(tempfile.mkdtemp())
    data = paired_texts(
        options.model_x,
        options.model_y,
        kept,
        site=options.site,
        texts=options.texts,
        held_out=options.texts // 4,
    )
    fitting, held_out = both_halves(data)
    x, y = fitting.x, fitting.y
    figures.add("rows to train on", x.shape[1])
    latents = options.expansion * y.shape[2]
    settings = Settings(latents, options.active, options.rate)
    for seed in options.seeds:
        of_x = train(settings, ready(settings, x, seed), x, options.training, seed)
        figures.add(f"seed {seed}: X's own FVU", error(of_x, held_out.x))
        dictionary = dictionary_of(of_x, 0, model="x", site=1)
        carried = carried_over(dictionary, x, y)
        errors: dict[str, dict[int, float]] = {"drawn": {}, "carried": {}}
        for start, found in errors.items():
            for steps in [0, *options.steps]:
                aligner = ready(settings, y, seed + 1)
                if start == "carried":
                    start_from(aligner, 0, carried, y[0])
                train(settings, aligner, y, steps, seed + 1)
                found[steps] = error(aligner, held_out.y)
                figures.add(f"seed {seed}: {start}, {steps} steps: FVU", found[steps])
            found.pop(0)
        most = max(options.steps)
        needed = steps_to(errors["drawn"][most], errors["carried"])
        figures.add(f"seed {seed}: saving", 1 - needed / most)
    figures.write(options.json)


if __name__ == "__main__":
    main()
