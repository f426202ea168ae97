"""Does the default INN end no worse than it starts, however few the steps? On states of two real models.

Token rows of two models of one width and one tokenizer, read from the sentences of a text source at a site of each;
the last tenth of the texts is held out. A run is one INN with its default options, and the loss, rates, schedule and
clipping of `train.py fit`; nothing is chosen by width or by steps. It is judged as a validation judges it: by
FVU plus that of the inverse, on the held-out rows.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a bare checkout

from aligners.api.models import load, states
from aligners.maps.base import Aligner
from aligners.maps.inn import INN
from aligners.maps.linear import Linear, Procrustes
from aligners.similarity.algebra.moments import moments_of
from benchmarks.harness import Figures, parser
from benchmarks.widths import Rows, held_out, train
from datamodules.text.loading import load_texts
from datamodules.text.sources import TextSource


def rows_of(options: argparse.Namespace) -> Rows:
    """The paired rows of the two models."""
    texts = list(load_texts(TextSource(options.source, max_texts=options.texts)).fit["text"])
    fitted = 9 * len(texts) // 10
    parts = []
    for sentences in (texts[:fitted], texts[fitted:]):
        for model, site in zip(options.models, options.sites, strict=True):
            parts.append(states(load(model), sentences, site)[None].to(options.device))
    x, y, held_x, held_y = parts
    return Rows(x, y, held_x, held_y, None)


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "models", nargs="*", default=["embedded:0", "embedded:1"], help="names or folders of X and Y"
    )
    arguments.add_argument("--sites", type=int, nargs=2, default=[2, 2], help="site of X and of Y")
    arguments.add_argument("--source", default="rotten_tomatoes")
    arguments.add_argument("--texts", type=int, default=1_500)
    arguments.add_argument("--steps", type=int, nargs="*", default=[6, 40, 150, 1000])
    arguments.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    arguments.add_argument("--rows", type=int, default=256, help="rows a step")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    rows, figures = rows_of(options), Figures(options.device)
    width, moments = rows.x.shape[-1], moments_of(rows.x, rows.y)
    closed: dict[str, Aligner] = {"linear": Linear(1, width, width), "procrustes": Procrustes(1, width, width)}
    for name, aligner in closed.items():
        aligner.to(options.device).fit(moments)
        figures.add(f"width {width}: {name}, FVU", held_out(aligner, rows, moments)[0])
    for steps in options.steps:
        for seed in options.seeds:
            name = f"width {width}, {steps} steps, seed {seed}"
            found = train(INN, rows, steps, options.rows, seed, "float32")
            figures.add(f"{name}: start, FVU", found.start[0])
            figures.add(f"{name}: end, FVU", found.end[0])
            figures.add(f"{name}: end / start, both ways", sum(found.end) / sum(found.start), bar=1.0)
            figures.add(f"{name}: diverged at step", found.diverged, bar=0)
            figures.write(options.json)


if __name__ == "__main__":
    main()
