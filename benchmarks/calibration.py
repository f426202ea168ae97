"""What is left of similarities once the null is taken off: models of one kind, and sentence encoders of several.

    python -m benchmarks.calibration --pairs embedded-gpt:0,embedded-gpt:1 MINILM,E5 --json calibration.json

A row is the mean state of a text, at the middle and the last site of each model. Each line has the value of a measure
between the last sites, its null (texts in other orders), the effect over it, and p over all four pairs of sites. Gröger
et al. 2026 (arXiv 2602.14486) say that global measures fall to their nulls so, and neighbourhoods do not.
"""

import argparse
from pathlib import Path

import torch

from aligners.api import TextSource, compare_arrays, load, load_texts, states
from benchmarks.harness import machine, parser, write_whole

MEASURES = (
    "cka",
    "unbiased_cka",
    "nbs",
    "rbf_cka",
    "rsa",
    "rsa_centred",
    "rsa_spearman",
    "mutual_knn",
    "jaccard_knn",
    "cknna",
)
SHOWN = ("value", "null", "effect", "p_family")


def arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    given = parser(__doc__)
    given.add_argument(
        "--pairs", nargs="+", default=["embedded-gpt:0,embedded-gpt:1"], metavar="X,Y"
    )
    given.add_argument("--counts", nargs="+", type=int, default=[50, 300])
    given.add_argument("--draws", type=int, default=99)
    given.add_argument("--max_length", type=int, default=64)
    return given.parse_args()


def rows_of(name: str, texts: list[str], max_length: int) -> torch.Tensor:
    """The mean states of texts at the middle and the last site of a model, (2, N, d)."""
    model = load(name)
    sites = [model.depth // 2, model.depth]
    return states(model, texts, sites, rows="mean", max_length=max_length)


def lines_of(
    pair: str, x: torch.Tensor, y: torch.Tensor, draws: int
) -> list[dict[str, object]]:
    """A line for each measure of the last sites of both models."""
    found = compare_arrays(
        dict(enumerate(x)), dict(enumerate(y)), MEASURES, draws=draws
    )
    lines = []
    for row in found.rows():
        if (row["site_x"], row["site_y"]) != (1, 1):
            continue
        line = {"pair": pair, "rows": x.shape[1], "measure": row["measure"]}
        for name in SHOWN:
            line[name] = row[name]
        lines.append(line)
    return lines


def table(lines: list[dict[str, object]]) -> str:
    """The lines as a Markdown table."""
    written = [
        "| models | rows | measure | value | null | effect | p, all pairs |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        figures = [f"{line[name]:.3f}" for name in SHOWN]
        cells = [line["pair"], line["rows"], line["measure"], *figures]
        written.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(written)


def main() -> None:
    """Print the table, and write it after every pair of models."""
    options = arguments()
    torch.set_num_threads(options.threads)
    texts = load_texts(TextSource())
    read = list(dict.fromkeys(texts.fit["text"]))[: max(options.counts)]
    kept: dict[str, torch.Tensor] = {}
    lines: list[dict[str, object]] = []
    for names in options.pairs:
        both = names.split(",")
        for name in both:
            if name not in kept:
                kept[name] = rows_of(name, read, options.max_length)
        x, y = (kept[name] for name in both)
        pair = " and ".join(Path(name).name for name in both)
        for count in options.counts:
            lines += lines_of(pair, x[:, :count], y[:, :count], options.draws)
        print(table(lines[-len(options.counts) * len(MEASURES) :]), flush=True)
        if options.json is not None:
            write_whole(
                options.json, {"machine": machine(options.device), "lines": lines}
            )


if __name__ == "__main__":
    main()
