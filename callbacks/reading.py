"""What a report says, in two sentences computed from its numbers, and the price of bijectivity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aligners.methods import BOTH_WAYS, TRAINED

__all__ = ["directions", "price_of_bijectivity", "reading"]

ALIKE = 0.05  # networks count as equally large within this share


def price_of_bijectivity(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """FVU of each trained bijection over that of an equally large network that is free, at each site.

    A bijection is compared in the directions in which it was trained, each time with a network trained that
    way. 1 means that being invertible cost nothing.
    """
    place = ("model_x", "model_y", "direction", "site_x", "site_y")
    free = [row for row in rows if row["fit"] == TRAINED and not row["bijective"]]
    return [
        {
            **{key: row[key] for key in place},
            "method": row["method"],
            "fit": row["fit"],
            "against": other["method"],
            "ratio": row["fvu"] / other["fvu"],
        }
        for row in rows
        if row["bijective"] and row["fit"] in (TRAINED, BOTH_WAYS) and row["fvu"] is not None
        for other in free
        if other["fvu"]
        and all(other[key] == row[key] for key in place)
        and abs(other["parameters"] - row["parameters"]) <= ALIKE * row["parameters"]
    ]


def reading(rows: Sequence[dict[str, Any]]) -> str:
    """Two sentences for each direction: does Y still do its task, and how exact is the map."""
    return "\n".join(_reading(panel, source, target) for source, target, panel in directions(rows))


def directions(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """(from, into, rows) of each pair of models and direction, in the order in which they first come."""
    panels: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        panels.setdefault((row["model_x"], row["model_y"], row["direction"]), []).append(row)
    return [(source, target, panel) for (source, target, _), panel in panels.items()]


def _reading(rows: list[dict[str, Any]], source: str, target: str) -> str:
    native = next(row["accuracy"] for row in rows if row["method"] == "native_y")
    methods = _by_method(rows)
    behaviour = f"{target} answers {native:.1%} of the held-out texts rightly on its own"
    if "identity" in methods:
        accuracies = [row["accuracy"] for row in methods["identity"]]
        behaviour += f" and {_range(accuracies, '.1%')} when {source}'s states are put in as they are"
    kept = {
        name: min(row["accuracy"] for row in line) - native
        for name, line in methods.items()
        if line[0]["role"] == "method" and all(row["accuracy"] is not None for row in line)
    }
    if kept:
        good = [name for name, gap in kept.items() if gap >= -0.015]
        worse = {name: gap for name, gap in kept.items() if gap < -0.015}
        if good:
            behaviour += f"; mapped by {_list(good)} they keep it within 1.5 points of that at every site"
        if worse:
            costs = [f"{name} {100 * gap:.1f}" for name, gap in worse.items()]
            behaviour += f"; in points, the worst site loses with {_list(costs)}"
    return f"{behaviour}. {_exactness(rows, methods)}"


def _exactness(rows: list[dict[str, Any]], methods: dict[str, list[dict[str, Any]]]) -> str:
    mapped = {
        name: line
        for name, line in methods.items()
        if line[0]["role"] == "method" and all(row["fvu"] is not None for row in line)
    }
    if not mapped:
        return "No map was evaluated."
    best = min(mapped, key=lambda name: sum(row["fvu"] for row in mapped[name]))
    sentence = (
        f"The closest map, {best}, leaves {_range([r['fvu'] for r in mapped[best]], '.1%')} of the variance unexplained"
    )
    if "linear" in mapped and best != "linear":
        sentence += f", where linear leaves {_range([r['fvu'] for r in mapped['linear']], '.1%')}"
    prices: dict[tuple[str, str], list[float]] = {}
    for entry in price_of_bijectivity(rows):
        prices.setdefault((entry["method"], entry["against"]), []).append(entry["ratio"])
    said = [f"{name} {_range(ratios, '.2f')} times {against}" for (name, against), ratios in prices.items()]
    if said:
        sentence += f"; the price of bijectivity, FVU against a free network of the same size, is {_list(said)}"
    return sentence + "."


def _by_method(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = dict.fromkeys(row["method"] for row in rows if row["site_x"] is not None)
    return {name: [row for row in rows if row["method"] == name] for name in names}


def _range(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _list(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]
