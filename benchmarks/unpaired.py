"""How many pairs does a rotation need? Rows of two models that are not of the same texts, and a few that are.

    python -m benchmarks.unpaired --models embedded:0 embedded:1 --sites 4 4 --json unpaired.json
    python -m benchmarks.unpaired --vectors minilm.npy e5.npy --pairs 0 5 10 20 50 100 500 --json unpaired.json

Rows are the means of the tokens of the embedded reviews, or vectors (N, d) of the same texts in two files, which are
shuffled alike. X's rows are of one half of the fitting texts, Y's of the other half; of the number of pairs in a line,
both have the row. The last tenth of the texts is held out, at most 1,000, and retrieval is among these. Beside
`Procrustes().fit_unpaired` stand the Procrustes map of the known pairs alone, and that of all fitting texts as pairs,
the best that a rotation can do.
"""

import argparse
import time

import numpy as np
import torch
from torch import Tensor

from aligners.api import Matching, Procrustes, TextSource, load_texts, states
from aligners.api.map_report import Row
from benchmarks.harness import Figures, parser

HELD_OUT = 1000
MODELS = ["embedded:0", "embedded:1"]
SITES = [4, 4]
PAIRS = [0, 5, 20, 100, 500]


def main() -> None:
    """Print FVU and retrieval on held-out texts for each number of pairs."""
    options = asked()
    torch.set_num_threads(options.threads)
    if options.vectors:
        x, y = rows_of_vectors(options.vectors)
    else:
        x, y = rows_of_models(options)
    tenth = len(x) // 10
    fitted = len(x) - min(HELD_OUT, tenth)
    figures = Figures(options.device)
    for pairs in options.pairs:
        measure(figures, x, y, fitted, pairs, options.repeats)
        figures.write(options.json)
    whole = Procrustes(scale=True)
    whole.fit(x[:fitted], y[:fitted])
    held_out = x[fitted:], y[fitted:]
    add(figures, "all texts paired", whole, *held_out)
    figures.write(options.json)


def asked() -> argparse.Namespace:
    """Parse the command line."""
    arguments = parser(__doc__)
    option = arguments.add_argument
    option("--models", nargs=2, default=MODELS)
    option("--sites", nargs=2, type=int, default=SITES)
    option("--vectors", nargs=2, metavar="NPY", help="in place of models")
    option("--texts", type=int, default=5000)
    option("--pairs", nargs="*", type=int, default=PAIRS)
    option("--repeats", type=int, default=Matching.repeats)
    return arguments.parse_args()


def rows_of_models(options: argparse.Namespace) -> list[Tensor]:
    """Read the means of the tokens of each text."""
    texts = load_texts(TextSource())
    first = texts.fit["text"][: options.texts]
    read = list(dict.fromkeys(first))
    rows = []
    for model, site in zip(options.models, options.sites, strict=True):
        of_model = states(model, read, site=site, rows="mean")
        rows.append(of_model)
    return rows


def rows_of_vectors(paths: list[str]) -> list[Tensor]:
    """Read the vectors of texts, in one random order: files may be sorted by subject."""
    rows = [np.load(path) for path in paths]
    draw = np.random.default_rng(0)
    order = draw.permutation(len(rows[0]))
    return [torch.from_numpy(of_model[order]) for of_model in rows]


def measure(
    figures: Figures, x: Tensor, y: Tensor, fitted: int, pairs: int, repeats: int
) -> None:
    """Fit on halves that have a number of texts in common, and add what the maps reach on held-out texts."""
    half = fitted // 2
    paired_x = x[:pairs]
    paired_y = y[:pairs]
    unpaired_y = y[half:fitted]
    of_y = torch.cat([paired_y, unpaired_y])
    numbers = np.arange(pairs)
    known = np.stack([numbers, numbers], 1)
    held_out = x[fitted:], y[fitted:]
    name = f"{pairs} of {half} rows paired"

    begun = time.process_time()
    how = Matching(repeats=repeats)
    found = Procrustes(scale=True)
    found.fit_unpaired(x[:half], of_y, known, how)
    seconds = time.process_time() - begun
    add(figures, name, found, *held_out)
    figures.add(f"{name}: mean cosine with the nearest", found.nearest_cosine_)
    figures.add(f"{name}: seconds of processors", seconds)
    if pairs <= 2:
        return
    alone = Procrustes(scale=True)
    alone.fit(paired_x, paired_y)
    add(figures, f"these {pairs} pairs alone", alone, *held_out)


def add(figures: Figures, name: str, fitted: Procrustes, x: Tensor, y: Tensor) -> None:
    """Add what a map reaches on held-out rows."""
    report = fitted.report(x, y)
    row: Row = report.rows()[0]
    for figure in ("fvu", "cosine", "top1_centred"):
        value = row[figure]
        figures.add(f"{name}: {figure}", value)


if __name__ == "__main__":
    main()
