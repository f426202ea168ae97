"""The lines of a stitching report: routes, or means over the routes of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from aligners.injection.scoring.pair_intervals import over_pairs
from aligners.reports.names import short_names
from aligners.reports.report import Row
from aligners.similarity.controls import matching_layers

__all__ = ["Line", "averaged", "is_grid", "lines_of", "matching_pairs", "methods_of", "what_intervals_are"]

Pair = tuple[int, int]
MOST_MODELS = 3  # more routes than theirs cannot be told apart in a panel


class Line(NamedTuple):
    """One line of a figure or table.

    Attributes:
        name: `X → Y`, or the name of a group.
        model_x: the source; None for a group.
        model_y: the target; None for a group.
        same: whether models are stitched to themselves.
        rows: those of all methods and site pairs; a route also has "native".
    """

    name: str
    model_x: str | None
    model_y: str | None
    same: bool
    rows: list[Row]


def averaged(rows: Sequence[Row], groups: Mapping[str, Sequence[str]] | None) -> bool:
    """Tell whether lines are means over routes: with groups, or with too many models to tell routes apart."""
    return groups is not None or len({row[f"model_{side}"] for row in rows for side in "xy"}) > MOST_MODELS


def lines_of(
    rows: Sequence[Row],
    groups: Mapping[str, Sequence[str]] | None = None,
    **averaging: Sequence[str],
) -> list[Line]:
    """Turn rows into lines; models stitched to themselves come last.

    Args:
        rows: of all routes.
        groups: as in `over_pairs`.
        averaging: other arguments of `over_pairs`.
    """
    found: dict[Any, list[Row]] = {}
    if averaged(rows, groups):
        for row in over_pairs(rows, groups, **averaging):
            found.setdefault(row["group"], []).append(row)
        lines = [Line(name, None, None, name == "same model", own) for name, own in found.items()]
    else:
        names = short_names(row[f"model_{side}"] for row in rows for side in "xy")
        for row in rows:
            found.setdefault((row["model_x"], row["model_y"]), []).append(row)
        lines = [Line(f"{names[x]} → {names[y]}", x, y, x == y, own) for (x, y), own in found.items()]
    return sorted(lines, key=lambda line: line.same)


def methods_of(rows: Sequence[Row]) -> list[str]:
    """List the methods that have sites, floors last."""
    roles = {row["method"]: row["role"] for row in rows if row["site_x"] is not None}
    return sorted(roles, key=lambda method: roles[method] == "floor")


def is_grid(rows: Sequence[Row]) -> bool:
    """Tell whether some route pairs a site of its source with more than one site of its target."""
    return any(len(set(own)) > max(len({pair[side] for pair in own}) for side in (0, 1)) for own in _pairs(rows))


def matching_pairs(rows: Sequence[Row]) -> list[Pair]:
    """Return the site pairs of all routes by depth; of a grid, only those of equal relative depth."""
    found: set[Pair] = set()
    for own in _pairs(rows):
        depths = [sorted({pair[side] for pair in own}) for side in (0, 1)]
        along = set(own) & set(matching_layers(*depths)) if len(set(own)) > max(map(len, depths)) else set(own)
        found |= along
    return sorted(found, key=lambda pair: (sum(pair), pair))


def what_intervals_are(rows: Sequence[Row], groups: Mapping[str, Sequence[str]] | None = None) -> str:
    """Say in words what the lines' intervals are taken over."""
    if not averaged(rows, groups):
        return "95 % interval over texts"
    return " or ".join(sorted({row["interval"] for line in lines_of(rows, groups) for row in line.rows}))


def _pairs(rows: Sequence[Row]) -> list[list[Pair]]:
    """Return the site pairs of each route or group."""
    found: dict[Any, list[Pair]] = {}
    for row in rows:
        if row["site_x"] is not None:
            route = row.get("group") or (row["model_x"], row["model_y"])
            found.setdefault(route, []).append((row["site_x"], row["site_y"]))
    return list(found.values())
