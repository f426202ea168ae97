"""Tables of what carrying.py wrote: how much of what heads lost comes back, by map and number of texts, and forecasts.

python -m benchmarks.updates.tables FILE [FILE ...]
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm, spearmanr

Cell = dict[str, Any]
Figure = Callable[[Sequence[Cell]], float]
Score = Callable[[Cell], float]

STALE = 0.05  # AUROC lost: the head is stale
HARMED = 0.01
TEXTS = (50, 100, 200, 500, 1000, 2000, 5000)
LEAST_GAIN = 0.02  # AUROC, of the forecasts: decided on the first half
DRAWS = 1000


def forecast(agreement: float, native: float, share: float = 0.5) -> float:
    """The AUROC of a head whose answers correlate so much with those on OLD, which scored `native` there.

    Within each class OLD's answers are taken to be normal with variance 1 and means d apart, Φ(d / √2) = native; the
    carried answers are a multiple of them plus independent noise.
    """
    if agreement <= 0:
        return 0.5
    distance = np.sqrt(2) * norm.ppf(min(max(native, 0.5), 0.9999))
    variance = 1 + distance**2 * share * (1 - share)
    noise = variance * (1 / agreement**2 - 1)
    return float(norm.cdf(distance / np.sqrt(1 + noise) / np.sqrt(2)))


def interval(cells: Sequence[Cell], figure: Figure) -> str:
    """A figure, and its 95 % interval over draws of updates and heads together: the sites of both stay together."""
    groups = defaultdict(list)
    for cell in cells:
        groups[cell["update"], cell["head"]].append(cell)
    drawn, listed = np.random.default_rng(0), list(groups.values())
    values = [
        figure(
            [
                cell
                for i in drawn.integers(len(listed), size=len(listed))
                for cell in listed[i]
            ]
        )
        for _ in range(DRAWS)
    ]
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return f"{figure(cells):5.1f} [{low:5.1f}, {high:5.1f}]"


def recovered(way: Callable[[Cell], float], of: Callable[[Cell], float]) -> Figure:
    """Per cent of what was lost against `of` that comes back, over all cells together."""

    def figure(cells: Sequence[Cell]) -> float:
        lost = sum(of(cell) - cell["stale"] for cell in cells)
        return (
            100 * sum(way(cell) - cell["stale"] for cell in cells) / lost
            if lost > 0
            else float("nan")
        )

    return figure


def native(cell: Cell) -> float:
    """The score on OLD."""
    return cell["native"]


def ceiling(cell: Cell) -> float:
    """What a head trained anew on all labels reads on NEW, or the old one if that was less."""
    return min(cell["native"], max(cell["anew"]["all"], cell["stale"]))


def share_of_cells(
    way: Callable[[Cell], float], of: Callable[[Cell], float], share: float = 0.95
) -> Figure:
    """Per cent of the cells in which so much of the loss comes back."""

    def figure(cells: Sequence[Cell]) -> float:
        good = [
            way(cell) - cell["stale"] >= share * (of(cell) - cell["stale"])
            for cell in cells
        ]
        return 100 * float(np.mean(good))

    return figure


def choose(cell: Cell) -> None:
    """Add `decided, n`: what was decided on the first half of the updates, for each number of texts.

    The ridge towards the identity, on the rows that a head reads (on tokens for verbs), and only where its forecast
    says that more than so much is won; otherwise the head stays as it is. All of this is known without labels.
    """
    on = "tokens, " if cell["head"] == "tense" else ""
    for n in TEXTS:
        way = f"ridge to identity, {on}{n}"
        if way in cell["carried"]:
            before, after = (
                forecast(value, cell["native"])
                for value in (cell["stale agreement"], cell["agreement"][way])
            )
            carries = after - before > LEAST_GAIN
            cell["carried"][f"decided, {n}"] = (
                cell["carried"][way] if carries else cell["stale"]
            )
            cell["agreement"][f"decided, {n}"] = (
                cell["agreement"][way] if carries else cell["stale agreement"]
            )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    cells: list[Cell] = [
        cell for file in options.files for cell in json.loads(file.read_text())["cells"]
    ]
    for cell in cells:
        choose(cell)
    readable = [cell for cell in cells if cell["head"] != "nothing"]
    stale = [cell for cell in readable if cell["native"] - cell["stale"] >= STALE]
    by("update", cells, stale)
    by("head", cells, stale)
    by("site", cells, stale)
    ways(readable, stale)
    forecasts(readable)
    one_that_reads_nothing([cell for cell in cells if cell["head"] == "nothing"])


def by(name: str, cells: Sequence[Cell], stale: Sequence[Cell]) -> None:
    """Means by update, head or site."""
    print(
        f"\n{name:<14} cells stale  native  stale  anew all  anew 1000   (means over the stale cells)"
    )
    for value in dict.fromkeys(cell[name] for cell in cells):
        every, these = (
            [cell for cell in group if cell[name] == value] for group in (cells, stale)
        )
        scores = [
            [cell["native"], cell["stale"], cell["anew"]["all"], cell["anew"]["1000"]]
            for cell in these
        ]
        means = (
            "   ".join(f"{mean:.3f}" for mean in np.mean(scores, 0)) if scores else ""
        )
        print(f"{value:<14} {len(every):>5} {len(these):>5}   {means}")


def _found(kind: str, way: str, cell: Cell) -> float:
    """A score of a cell, NaN if it was not measured there."""
    return cell[kind].get(way, np.nan)


def ways(cells: Sequence[Cell], stale: Sequence[Cell]) -> None:
    """What comes back, by map and number of texts."""
    print(
        f"\n{len(stale)} stale cells of {len(cells)}. In %: recovered of the loss, and of what NEW still encodes; cells"
    )
    print(
        "with 95 % of the loss back, and of what NEW still encodes; all cells that are carried .01 below stale"
    )
    names = list(dict.fromkeys(way for cell in cells for way in cell["carried"]))
    scored: dict[str, Score] = {way: partial(_found, "carried", way) for way in names}
    scored |= {
        f"trained anew, {n} labels": partial(_found, "anew", n)
        for n in stale[0]["anew"]
    }
    scored["random direction"] = lambda cell: max(cell["random"], 1 - cell["random"])
    for way, score in sorted(scored.items()):
        all_of, these = (
            [cell for cell in group if not np.isnan(score(cell))]
            for group in (cells, stale)
        )
        if these:
            figures = [recovered(score, native), recovered(score, ceiling)]
            figures += [share_of_cells(score, native), share_of_cells(score, ceiling)]
            harmed = 100 * np.mean(
                [score(cell) < cell["stale"] - HARMED for cell in all_of]
            )
            said = "  ".join(interval(these, figure) for figure in figures)
            print(f"{way:<36} {len(these):>4}  {said}  {harmed:4.1f}")


def forecasts(cells: Sequence[Cell]) -> None:
    """Rank correlation between forecast and score, for each way whose agreement was measured."""
    print(
        "\nForecast against score: Spearman over all cells, and over cells by their change; mean absolute error"
    )
    for way in dict.fromkeys(way for cell in cells for way in cell["agreement"]):
        these = [cell for cell in cells if way in cell["agreement"]]
        said = [forecast(cell["agreement"][way], cell["native"]) for cell in these]
        scores = [cell["carried"][way] for cell in these]
        lost = [cell["native"] - cell["carried"][way] for cell in these]
        said_lost = [
            cell["native"] - value for cell, value in zip(these, said, strict=True)
        ]
        ranks = spearmanr(said, scores)[0], spearmanr(said_lost, lost)[0]
        error = np.mean(np.abs(np.subtract(said, scores)))
        print(f"{way:<36} {len(these):>4}  {ranks[0]:.3f}  {ranks[1]:.3f}  {error:.3f}")
    said = [forecast(cell["stale agreement"], cell["native"]) for cell in cells]
    scores = [cell["stale"] for cell in cells]
    print(f"{'stale':<36} {len(cells):>4}  {spearmanr(said, scores)[0]:.3f}")


def one_that_reads_nothing(cells: Sequence[Cell]) -> None:
    """The head with drawn labels."""
    scores = [cell["carried"][way] for cell in cells for way in cell["carried"]]
    native_scores = [cell["native"] for cell in cells]
    print(
        f"\nThe head that reads nothing: on OLD {np.mean(native_scores):.3f}, carried {np.mean(scores):.3f}"
    )


if __name__ == "__main__":
    main()
