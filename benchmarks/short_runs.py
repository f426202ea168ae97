"""Does the default INN hold in short and long runs, with many rows a step and few? On states of two real models.

Rows of two models of one width and one tokenizer, read from the sentences of a text source at a site of each: token
by token, or means over texts (`--kind mean`); the last tenth of the texts is held out. A run is one map with its
default options, and the loss, rates, schedule and clipping of `train.py fit`; nothing is chosen by width, steps or rows
a step. It is judged as a validation judges it: by FVU plus that of the inverse, on the held-out rows.

"plain" is what one would write first: couplings on alternating halves from the identity, AdamW at 1e-3 throughout, its
batches of the same size, trained both ways.
"""

import argparse
import itertools
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.api.model_states import load, states
from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.sources import TextSource
from aligners.maps.base import Aligner
from aligners.maps.inn import INN
from aligners.maps.linear import Linear, Procrustes
from aligners.similarity.algebra.moments import moments_of
from benchmarks.harness import Figures, parser
from benchmarks.widths import MAPS, Course, Rows, held_out, train


def rows_of(options: argparse.Namespace) -> Rows:
    """The paired rows of the two models; from the file `--kept` if it is there."""
    if options.kept and options.kept.exists():
        return _rows(torch.load(options.kept), options.device)
    texts = list(
        load_texts(TextSource(options.source, max_texts=options.texts)).fit["text"]
    )
    fitted = 9 * len(texts) // 10
    parts = []
    for sentences, most in (
        (texts[:fitted], options.most),
        (texts[fitted:], options.most // 5),
    ):
        for model, site in zip(options.models, options.sites, strict=True):
            read = states(load(model), sentences, site, rows=options.kind)
            parts.append(read[None, :most].clone())
    if options.kept:
        torch.save(parts, options.kept)
    return _rows(parts, options.device)


def _rows(parts: list[Tensor], device: str) -> Rows:
    x, y, held_x, held_y = (part.to(device) for part in parts)
    return Rows(x, y, held_x, held_y, None)


def train_plainly(rows: Rows, steps: int, a_step: int, seed: int) -> Course:
    """Train "plain"."""
    moments, width = moments_of(rows.x, rows.y), rows.x.shape[-1]
    torch.manual_seed(seed)
    aligner = INN(1, width, width, mixing="none").to(rows.x.device)
    aligner.fit(moments)
    start, optimizer = (
        held_out(aligner, rows, moments),
        torch.optim.AdamW(aligner.parameters(), lr=1e-3),
    )
    for _ in range(steps):
        chosen = torch.randint(rows.x.shape[1], (a_step,))
        optimizer.zero_grad()
        aligner.loss(rows.x[:, chosen], rows.y[:, chosen]).sum().backward()
        optimizer.step()
    return Course(start, held_out(aligner, rows, moments), 0, 0.0)


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "models",
        nargs="*",
        default=["embedded:0", "embedded:1"],
        help="names or folders of X and Y",
    )
    arguments.add_argument(
        "--sites", type=int, nargs=2, default=[2, 2], help="site of X and of Y"
    )
    arguments.add_argument("--source", default="rotten_tomatoes")
    arguments.add_argument("--texts", type=int, default=1_500)
    arguments.add_argument(
        "--kind", default="tokens", help="which rows: tokens, mean, cls or words"
    )
    arguments.add_argument(
        "--most",
        type=int,
        default=50_000,
        help="rows to fit on; a fifth of it to judge by",
    )
    arguments.add_argument(
        "--kept", type=Path, help="file that keeps the rows, or has them"
    )
    arguments.add_argument(
        "--maps", nargs="*", default=["inn"], choices=[*MAPS, "plain"]
    )
    arguments.add_argument("--steps", type=int, nargs="*", default=[6, 40, 150, 1000])
    arguments.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    arguments.add_argument("--rows", type=int, default=256, help="rows a step")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    rows, figures = rows_of(options), Figures(options.device)
    width, moments = rows.x.shape[-1], moments_of(rows.x, rows.y)
    closed: dict[str, Aligner] = {
        "linear": Linear(1, width, width),
        "procrustes": Procrustes(1, width, width),
    }
    for name, aligner in closed.items():
        aligner.to(options.device).fit(moments)
        figures.add(f"width {width}: {name}, FVU", held_out(aligner, rows, moments)[0])
    for kind, steps, seed in itertools.product(
        options.maps, options.steps, options.seeds
    ):
        run = (
            train_plainly
            if kind == "plain"
            else partial(train, MAPS[kind], products="float32")
        )
        course = run(rows=rows, steps=steps, a_step=options.rows, seed=seed)
        name = f"width {width}, {kind}, {steps} steps of {options.rows}, seed {seed}"
        figures.add(f"{name}: start, FVU", course.start[0])
        figures.add(f"{name}: end, FVU", course.end[0])
        if kind != "mlp":
            figures.add(f"{name}: end, FVU of the inverse", course.end[1])
            figures.add(
                f"{name}: end / start, both ways",
                sum(course.end) / sum(course.start),
                bar=1.0,
            )
        figures.add(f"{name}: diverged at step", course.diverged, bar=0)
        figures.write(options.json)


if __name__ == "__main__":
    main()
