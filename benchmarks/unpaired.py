"""How many pairs does a rotation need? Rows of two models that are not of the same texts, and a few that are.

    python -m benchmarks.unpaired --models embedded:0 embedded:1 --sites 4 4 --json unpaired.json

Rows are the means of the tokens of the embedded reviews. X's rows are of one half of the fitting texts, Y's of the
other half; of the number of pairs in a line, both have the row. The last tenth of the texts is held out, at most 1,000,
and retrieval is among these. Beside `Procrustes().fit_unpaired` stand the Procrustes map of the known pairs alone, and
that of all fitting texts as pairs, the best that a rotation can do.
"""

import time

import numpy as np
import torch
from torch import Tensor

from aligners.api import Matching, Procrustes, TextSource, load_texts, states
from aligners.api.map_report import Row
from benchmarks.harness import Figures, parser

HELD_OUT = 1000


def main() -> None:
    """Print FVU and retrieval on held-out texts for each number of pairs."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs=2, default=["embedded:0", "embedded:1"])
    arguments.add_argument("--sites", nargs=2, type=int, default=[4, 4])
    arguments.add_argument("--texts", type=int, default=5000)
    arguments.add_argument("--pairs", nargs="*", type=int, default=[0, 5, 20, 100, 500])
    arguments.add_argument("--repeats", type=int, default=Matching.repeats)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    texts = load_texts(TextSource())
    read = list(dict.fromkeys(texts.fit["text"][: options.texts]))
    rows = []
    for model, site in zip(options.models, options.sites, strict=True):
        rows.append(states(model, read, site=site, rows="mean"))
    x, y = rows
    fitted = len(x) - min(HELD_OUT, len(x) // 10)
    figures = Figures(options.device)
    for pairs in options.pairs:
        measure(figures, x, y, fitted, pairs, options.repeats)
        figures.write(options.json)
    whole = Procrustes(scale=True).fit(x[:fitted], y[:fitted])
    add(figures, "all texts paired", whole, x[fitted:], y[fitted:])
    figures.write(options.json)


def measure(
    figures: Figures, x: Tensor, y: Tensor, fitted: int, pairs: int, repeats: int
) -> None:
    """Fit on halves that have a number of texts in common, and add what the maps reach on held-out texts."""
    half = fitted // 2
    of_y = torch.cat([y[:pairs], y[half:fitted]])
    known = np.stack([np.arange(pairs)] * 2, 1)
    held_out = x[fitted:], y[fitted:]
    name = f"{pairs} of {half} rows paired"

    begun = time.process_time()
    how = Matching(repeats=repeats)
    found = Procrustes(scale=True).fit_unpaired(x[:half], of_y, known, how)
    seconds = time.process_time() - begun
    add(figures, name, found, *held_out)
    figures.add(f"{name}: mean cosine with the nearest", found.nearest_cosine_)
    figures.add(f"{name}: seconds of processors", seconds)
    if pairs > 2:
        alone = Procrustes(scale=True).fit(x[:pairs], y[:pairs])
        add(figures, f"these {pairs} pairs alone", alone, *held_out)


def add(figures: Figures, name: str, fitted: Procrustes, x: Tensor, y: Tensor) -> None:
    """Add what a map reaches on held-out rows."""
    row: Row = fitted.report(x, y).rows()[0]
    for figure in ("fvu", "cosine", "top1_centred"):
        figures.add(f"{name}: {figure}", row[figure])


if __name__ == "__main__":
    main()
