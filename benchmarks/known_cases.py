"""What every measure of representations says where the answer is known: a table, and two figures of it.

Rows are Gaussian with a decaying spectrum: the variance of direction k falls as 1/k, directions lie at random, and
features have a variance of 1 on average. Y is X in other coordinates, X with noise, or independent of X. Measures run
from X to Y with their defaults, minibatch CKA on quarters of the rows; values are means over seeds. A dash is a
refusal, and its reason is printed. The second table has independent rows alone, more and more of them. Not a timing.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import Tensor

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.similarity.algebra.grid import grid_moments
from aligners.similarity.functional.cca import cca, cca_held_out, pwcca, svcca
from aligners.similarity.functional.cka import linear_cka, minibatch_cka, unbiased_cka
from aligners.similarity.functional.kernels import rbf_cka, rsa, rsa_spearman
from aligners.similarity.functional.matching import hard_matching, soft_matching
from aligners.similarity.functional.neighbours import cknna, jaccard_knn, mutual_knn
from aligners.similarity.functional.predictivity import linear_predictivity
from aligners.similarity.functional.regression import mixedsim, neuronsim, r2
from aligners.similarity.functional.shape import angular_shape, nbs

__all__ = [
    "CASES",
    "CURVES",
    "MEASURES",
    "averaged",
    "bias_figure",
    "draw",
    "known_cases_figure",
]

WIDTH, ROWS = 32, 1000
BIAS_WIDTH, BIAS_ROWS = 64, (32, 48, 64, 72, 96, 128, 192, 256, 512, 1024, 2048, 4096)

Pair = tuple[Tensor, Tensor]
Table = dict[
    str, dict[str, float | None]
]  # measure -> case -> mean value, None where it is refused


def draw(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Rows of mean 0 with a decaying spectrum in random directions, (rows, width), float64."""
    variance = 1 / torch.arange(1, width + 1, dtype=torch.float64)
    deviation = (variance * width / variance.sum()).sqrt()
    return _normal(rows, width, generator) * deviation @ _rotation(width, generator)


def _unrelated(
    generator: torch.Generator, rows: int = ROWS, width: int = WIDTH
) -> Pair:
    return draw(rows, width, generator), draw(rows, width, generator)


def _mapped(
    change: Callable[[Tensor, torch.Generator], Tensor],
) -> Callable[[torch.Generator], Pair]:
    """X and what a change makes of it."""

    def pair(generator: torch.Generator) -> Pair:
        x = draw(ROWS, WIDTH, generator)
        return x, change(x, generator)

    return pair


def _noisy(generator: torch.Generator) -> Pair:
    """In every direction half of Y's variance is X, and half noise."""
    both = draw(2 * ROWS, WIDTH, generator)
    return both[:ROWS], both[:ROWS] + both[ROWS:]


def _repeated(generator: torch.Generator) -> Pair:
    """Every row many times, as words are in the embedding layer of a model without absolute positions."""
    x, y = (rows.repeat(40, 1) for rows in _unrelated(generator, 24))
    return x, y


def _outlier(generator: torch.Generator) -> Pair:
    """X and Y have the same first feature, 100 times as large as the others, and nothing else in common."""
    x, y = _unrelated(generator)
    shared = 100 * _normal(ROWS, 1, generator)[:, 0]
    x[:, 0], y[:, 0] = shared, shared
    return x, y


def _standardised(pair: Pair) -> Pair:
    x, y = ((rows - rows.mean(0)) / rows.std(0) for rows in pair)
    return x, y


def _padded(generator: torch.Generator) -> Pair:
    """Every second row of X is one vector, three deviations out; the same rows of Y are another."""
    x, y = _unrelated(generator)
    for rows in (x, y):
        rows[::2] = 3 * _normal(1, WIDTH, generator)
    return x, y


def _normal(rows: int, width: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, width, generator=generator, dtype=torch.float64)


def _rotation(width: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(_normal(width, width, generator)).Q


CASES: dict[str, dict[str, Callable[[torch.Generator], Pair]]] = {
    "X in other coordinates": {
        "identical": _mapped(lambda x, _: x),
        "rotated": _mapped(lambda x, generator: x @ _rotation(WIDTH, generator)),
        "scaled": _mapped(lambda x, _: 10 * x),
        "mean moved": _mapped(lambda x, _: x + 10 * x.std(0)),
        "neurons permuted": _mapped(
            lambda x, generator: x[:, torch.randperm(WIDTH, generator=generator)]
        ),
        "features rescaled": _mapped(
            lambda x, generator: (
                x
                * 10
                ** (4 * torch.rand(WIDTH, generator=generator, dtype=torch.float64) - 2)
            )
        ),
        "invertible map": _mapped(
            lambda x, generator: x @ _normal(WIDTH, WIDTH, generator)
        ),
    },
    "X, noisy": {"half noise": _noisy},
    "nothing to do with X": {
        "1,000 rows": _unrelated,
        "48 rows": partial(_unrelated, rows=48),
        "24 rows": partial(_unrelated, rows=24),
        "24 rows × 40": _repeated,
        "shared outlier": _outlier,
        "outlier, standard.": lambda generator: _standardised(_outlier(generator)),
        "half padding": _padded,
    },
}
MEASURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cka": linear_cka,
    "unbiased_cka": unbiased_cka,
    "minibatch_cka": lambda x, y: minibatch_cka(x, y, x.shape[1] // 4),
    "rbf_cka": rbf_cka,
    "cca": cca,
    "svcca": svcca,
    "pwcca": pwcca,
    "r2": r2,
    "neuronsim": neuronsim,
    "mixedsim": mixedsim,
    "linear_predictivity": linear_predictivity,
    "nbs": nbs,
    "angular_shape": angular_shape,
    "hard_matching": hard_matching,
    "soft_matching": soft_matching,
    "rsa": rsa,
    "rsa_centred": partial(rsa, kernel="centred_cosine"),
    "rsa_spearman": rsa_spearman,
    "mutual_knn": mutual_knn,
    "jaccard_knn": jaccard_knn,
    "cknna": cknna,
}


def _cca_held_out(x: Tensor, y: Tensor) -> Tensor:
    """Fitted on the first half of the rows, measured on the second."""
    fitted, held_out = (
        grid_moments(a, b) for a, b in zip(x.chunk(2, 1), y.chunk(2, 1), strict=True)
    )
    return cca_held_out(fitted, held_out)


def _on_first_half(
    measure: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: measure(x.chunk(2, 1)[0], y.chunk(2, 1)[0])


CURVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{
        name: _on_first_half(MEASURES[name])
        for name in ("cca", "svcca", "cka", "unbiased_cka")
    },
    "cca, held out": _cca_held_out,
}


def averaged(
    measures: Mapping[str, Callable[[Tensor, Tensor], Tensor]],
    cases: Mapping[str, Callable[[torch.Generator], Pair]],
    seeds: int,
) -> tuple[Table, dict[str, str]]:
    """Mean over seeds of every measure in every case, and why the refused ones were refused.

    Args:
        measures: from x (1, N, d) and y (1, N, d) to (1, 1).
        cases: from a generator to rows (N, d) each. The rows depend on the case and the seed alone.
        seeds: how many.
    """
    table: Table = {measure: {} for measure in measures}
    refused: dict[str, str] = {}
    for case, pair in cases.items():
        pairs = [pair(torch.Generator().manual_seed(seed)) for seed in range(seeds)]
        for name, measure in measures.items():
            try:
                table[name][case] = (
                    sum(float(measure(x[None], y[None])) for x, y in pairs) / seeds
                )
            except ValueError as error:
                table[name][case] = None
                refused[f"{name}, {case}"] = str(error)
    return table, refused


def known_cases_figure(table: Table, groups: Mapping[str, Sequence[str]]) -> Figure:
    """The table as a heat map: measures down, cases across, values in the cells."""
    cases = [case for group in groups.values() for case in group]
    with mpl.rc_context({"font.size": 9}):
        figure = Figure(
            figsize=(0.68 * len(cases) + 1.2, 0.36 * len(table) + 1.4),
            layout="constrained",
        )
        axis = figure.subplots()
    values = [[_shade(table[measure][case]) for case in cases] for measure in table]
    axis.imshow(
        values,
        vmin=0,
        vmax=1,
        cmap=mpl.colormaps["Blues"].with_extremes(bad="0.92"),
        aspect="auto",
    )
    for i, measure in enumerate(table):
        for j, case in enumerate(cases):
            dark = _shade(table[measure][case]) > 0.6
            axis.text(
                j,
                i,
                _written(table[measure][case]),
                ha="center",
                va="center",
                color="w" if dark else "k",
            )
    axis.set_xticks(range(len(cases)), [case.replace(" ", "\n", 1) for case in cases])
    axis.set_yticks(range(len(table)), list(table))
    axis.tick_params(length=0, labeltop=True, labelbottom=False)
    axis.spines[:].set_visible(False)
    start = 0
    for group, members in groups.items():
        middle = start + (len(members) - 1) / 2
        axis.annotate(group, (middle, 1), (0, 36), xycoords=("data", "axes fraction"), textcoords="offset points",
                      ha="center", weight="bold")  # fmt: skip
        start += len(members)
        if start < len(cases):
            axis.axvline(start - 0.5, color="w", linewidth=6)
    return figure


def bias_figure(table: Table) -> Figure:
    """Measures of independent rows against the number of rows."""
    # Okabe and Ito's colours, which colour-blind readers can tell apart.
    colours = dict(
        zip(
            CURVES, ("#D55E00", "#E69F00", "#0072B2", "#56B4E9", "#000000"), strict=True
        )
    )
    with mpl.rc_context(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure = Figure(figsize=(7, 3.4), layout="constrained")
        axis = figure.subplots()
    for (name, line), marker in zip(table.items(), "osD^x", strict=True):
        there = {int(rows): value for rows, value in line.items() if value is not None}
        axis.plot(
            list(there),
            list(there.values()),
            color=colours[name],
            marker=marker,
            markersize=4,
            label=name,
        )
    axis.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axis.axvline(BIAS_WIDTH, color="0.8", linewidth=0.8, zorder=0)
    axis.text(BIAS_WIDTH, 1.02, " rows = width", va="bottom", color="0.4")
    ticks = [2**k for k in range(5, 13)]
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.set_ylim(-0.06, 1.02)
    axis.set_xlabel(f"rows; X and Y are independent, {BIAS_WIDTH} wide")
    axis.set_ylabel("similarity, mean over seeds")
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _shade(value: float | None) -> float:
    return float("nan") if value is None else value


def _written(value: float | None) -> str:
    """Two digits, without the zero before the point; -0.00 is 0."""
    if value is None:
        return "—"
    text = f"{value + 0.0:.2f}".replace("0.", ".", 1)
    return text.removeprefix("-") if text == "-.00" else text.replace("-", "−")


def _show(table: Table) -> None:
    """Print the table with cases down and measures across."""
    print(" " * 18 + "".join(f"  {name:>5}" for name in table))
    for case in next(iter(table.values())):
        cells = (
            _written(line[case]).rjust(max(len(name), 5))
            for name, line in table.items()
        )
        print(f"{case:<18}" + "".join(f"  {cell}" for cell in cells))


def main() -> None:
    """Print the tables, and write what was asked for."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    arguments.add_argument(
        "--json", type=Path, metavar="FILE", help="write the values there too"
    )
    arguments.add_argument(
        "--figure", type=Path, metavar="FILE", help="draw the known cases there (PNG)"
    )
    arguments.add_argument(
        "--bias-figure",
        type=Path,
        metavar="FILE",
        help="draw the independent rows there (PNG)",
    )
    arguments.add_argument(
        "--seeds", type=int, default=10, help="draws that are averaged"
    )
    arguments.add_argument(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        help="CPU threads of torch",
    )
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    seeds: int = options.seeds
    known, refused = averaged(
        MEASURES,
        {name: pair for group in CASES.values() for name, pair in group.items()},
        seeds,
    )
    _show(known)
    more = {
        str(n): partial(_unrelated, rows=2 * n, width=BIAS_WIDTH) for n in BIAS_ROWS
    }
    bias, refused_bias = averaged(CURVES, more, seeds)
    print(f"\nIndependent rows, {BIAS_WIDTH} wide, by their number")
    _show(bias)
    print("\nRefused")
    refused |= {f"{what} rows": why for what, why in refused_bias.items()}
    for what, why in refused.items():
        print(f"{what}: {why}")
    if options.json:
        found = {
            "seeds": seeds,
            "known_cases": known,
            "independent": bias,
            "refused": refused,
        }
        options.json.write_text(json.dumps(found, indent=2))
    if options.figure:
        groups = {group: list(cases) for group, cases in CASES.items()}
        known_cases_figure(known, groups).savefig(options.figure, dpi=130)
    if options.bias_figure:
        bias_figure(bias).savefig(options.bias_figure, dpi=130)


if __name__ == "__main__":
    main()
