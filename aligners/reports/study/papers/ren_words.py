"""What the tables of Ren et al. say, in words."""

from __future__ import annotations

from collections.abc import Sequence

from aligners.reports.study.contents import Cell
from aligners.reports.study.estimates import Estimate
from aligners.reports.study.frames import kind_words, place_words
from aligners.reports.words import listed

__all__ = ["closest_maps", "differences_said", "kept_scores"]


def closest_maps(rows: Sequence[dict[str, Cell]], column: str, keys: Sequence[str]) -> list[str]:
    """Say at each place which map is closest of those that are trained, and where linear stands."""
    said = []
    for place in dict.fromkeys(tuple(row.get(key) for key in keys) for row in rows):
        here = [row for row in rows if tuple(row.get(key) for key in keys) == place and row.get("role") != "floor"]
        cells = [(str(row["method"]), row[column]) for row in here if row["compared"]]
        means = {method: cell for method, cell in cells if isinstance(cell, Estimate)}
        if not means:
            continue
        best = min(means, key=lambda name: means[name].mean)
        where = place_words(*(_word(key, name) for key, name in zip(keys, place, strict=True)))
        linear = f"; linear {means['linear'].mean:.4f}" if "linear" in means and best != "linear" else ""
        over = _over(means[best], pairs="strength" not in keys)
        said.append(
            f"{where + ': ' if where else ''}the closest map is {best}, with an mse of {means[best].mean:.4f} over "
            f"{over}{linear}."
        )
    return said


def _over(value: Estimate, *, pairs: bool) -> str:
    """Of how many models, and pairs of them, an estimate is."""
    models = f"{value.models} model{'' if value.models == 1 else 's'}"
    return f"{value.pairs} pair{'' if value.pairs == 1 else 's'} of {models}" if pairs else models


def differences_said(rows: Sequence[dict[str, Cell]]) -> str:
    """Say which maps differ in error, and how small a p the number of models allows."""
    found = [f"{row['method']} ({place_words(*(str(row[key]) for key in ('task', 'stage') if row[key]))})"
             for row in rows if isinstance(row["holm"], float) and row["holm"] < 0.05]  # fmt: skip
    if found:
        return f"{len(found)} of {len(rows)} differences between maps are significant at .05: {listed(found)}."
    least = min(float(str(row["least"])) for row in rows)
    few = f", and {rows[0]['models']} models allow no p below {least:.3g}" if least >= 0.05 / len(rows) else ""
    return f"None of {len(rows)} differences between maps is significant at .05{few}."


def kept_scores(rows: Sequence[dict[str, Cell]]) -> list[str]:
    """Say for each task which trained map keeps the most of Y's score."""
    said = []
    for place in dict.fromkeys((row["task"], row["stage"]) for row in rows):
        own = {str(row["method"]): row for row in rows if (row["task"], row["stage"]) == place}
        maps = {name: row["score"] for name, row in own.items() if row["role"] == "method" and row["compared"]}
        scores = {name: value.mean for name, value in maps.items() if isinstance(value, Estimate)}
        native = own.get("native_y", {}).get("score")
        if scores and isinstance(native, Estimate):
            best = max(scores, key=lambda name: scores[name])
            where = place_words(*(str(name) for name in place if name))
            floor = own.get("identity", {}).get("score")
            bare = f", {100 * floor.mean:.1f} without a map" if isinstance(floor, Estimate) else ""
            said.append(
                f"{where + ': ' if where else ''}Y by itself scores {100 * native.mean:.1f}; with X's states at the "
                f"last site {100 * scores[best]:.1f}, mapped by {best}{bare}."
            )
    return said


def _word(key: str, value: Cell) -> str | None:
    if value is None or value == "":
        return None
    return kind_words(str(value)) if key == "rows" else f"strength {value}" if key == "strength" else str(value)
