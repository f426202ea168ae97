"""The findings of stitching in words, computed from its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aligners.fitting.outcomes import is_trained
from aligners.injection.scoring.pair_intervals import OVER_MODELS
from aligners.reports.names import short_names, site_name
from aligners.reports.report import Row
from aligners.reports.stitching.lines import averaged, lines_of, methods_of
from aligners.reports.words import score_words, value_range

__all__ = ["findings"]

SMALL = 0.01  # nats, and hundredths of the score


def findings(rows: Sequence[Row], groups: Mapping[str, Sequence[str]] | None = None) -> list[str]:
    """Write a sentence for each finding on each method.

    They say which direction costs more, whether models stitched to themselves lose anything, how much of the targets'
    score is kept and, with groups, which routes cost more. Of a route that overflows they say only that it does, and
    nothing of a layer that is not trained.

    Args:
        rows: of all routes.
        groups: see `aligners.injection.scoring.pair_intervals.over_pairs`.
    """
    found = []
    for method in methods_of(rows):
        own = [row for row in rows if row["method"] == method and is_trained(row)]
        if not own:
            continue
        sound = [row for row in own if row["penalty"] is not None]
        sentences = [_overflow(own)]
        if sound and own[0]["role"] == "floor":
            sentences.append(_cost(sound))
        elif sound:
            sentences += [*_baselines(sound), _accuracy(sound)]
            if not averaged(rows, groups):
                sentences[1:1] = _directions(sound)
        if groups is not None:
            sentences += _between_groups(own, groups)
        found += [f"{method}: {sentence}." for sentence in sentences if sentence]
    return found


def _overflow(rows: Sequence[Row]) -> str:
    count = sum(row["penalty"] is None for row in rows)
    return f"the stitched model gives no finite loss at {count} of {_places(rows)}" if count else ""


def _cost(rows: Sequence[Row]) -> str:
    costs = [row["penalty"] for row in rows if not row["same_model"]]
    return f"between different models the penalty is {value_range(costs, '.3f')} nats" if costs else ""


def _directions(rows: Sequence[Row]) -> list[str]:
    """Say of each pair of models which direction costs more, comparing X's site l into Y's m with Y's m into X's l."""
    names = short_names(row[f"model_{side}"] for row in rows for side in "xy")
    cells = {(row["model_x"], row["model_y"], row["site_x"], row["site_y"]): row for row in rows}
    pairs: dict[tuple[str, str], list[tuple[Row, Row]]] = {}
    for (x, y, i, j), row in cells.items():
        back = cells.get((y, x, j, i))
        if x != y and back is not None and (y, x) not in pairs:
            pairs.setdefault((x, y), []).append((row, back))
    return [_direction(names[x], names[y], both) for (x, y), both in pairs.items()]


def _direction(x: str, y: str, both: Sequence[tuple[Row, Row]]) -> str:
    there = sum(a["penalty"] > b["penalty"] for a, b in both)
    back = sum(a["penalty"] < b["penalty"] for a, b in both)
    if there < back:
        return _direction(y, x, [(b, a) for a, b in both])
    clear, against = (
        sum(a["penalty_low"] > b["penalty_high"] for a, b in turned) for turned in (both, [(b, a) for a, b in both])
    )
    what = "site" if all(row["site_x"] == row["site_y"] for row, _ in both) else "site pair"
    said = f"{x} → {y} costs more than {y} → {x} at {_of(there, len(both), what)}"
    said += f", beyond the intervals over texts of both at {clear}" if there else ""
    return said + (f"; the reverse costs more beyond both at {against}" if against else "")


def _baselines(rows: Sequence[Row]) -> list[str]:
    """Say what stitching a model to itself costs, and whether different models cost more."""
    same = [row for row in rows if row["same_model"] and row["site_x"] == row["site_y"]]
    if not same:
        return []
    most = max(row["penalty"] for row in same)
    said = (
        f"stitched to themselves, models have a penalty of {value_range([row['penalty'] for row in same], '.3f')} nats"
    )
    said += f", none above {SMALL:g}" if most <= SMALL else f", above {SMALL:g} at {_above(same)}"
    found = [said]
    base = {(row["model_y"], row["site_y"]): row for row in same}
    others = [row for row in rows if not row["same_model"] and (row["model_y"], row["site_y"]) in base]
    if others:
        dearer = sum(row["penalty_low"] > base[row["model_y"], row["site_y"]]["penalty_high"] for row in others)
        found.append(
            f"at {dearer} of {_places(others)} a different model costs more than the target stitched to itself, beyond "
            "the intervals over texts of both"
        )
    return found


def _above(rows: Sequence[Row]) -> str:
    return f"{sum(row['penalty'] > SMALL for row in rows)} of {_places(rows)}"


def _accuracy(rows: Sequence[Row]) -> str:
    others = [row for row in rows if not row["same_model"]]
    if not others:
        return ""
    names = short_names(row[f"model_{side}"] for row in rows for side in "xy")
    kept = sum(row["score_penalty"] <= SMALL for row in others)
    worst = max(others, key=lambda row: row["score_penalty"])
    what = score_words(rows).split(" in ")[0].split(" × ")[0]
    said = f"from a different model the target keeps its {what} within 1 point at {kept} of {_places(others)}"
    if worst["score_penalty"] > 0:
        said += (
            f"; most is lost from {names[worst['model_x']]} to {names[worst['model_y']]} at "
            f"{site_name((worst['site_x'], worst['site_y']))}, {100 * worst['score_penalty']:.1f} points"
        )
    return said


def _between_groups(rows: Sequence[Row], groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Compare routes from one group into another with those within either group."""
    lines = {
        line.name: {(row["site_x"], row["site_y"]): row for row in line.rows if row["penalty"] is not None}
        for line in lines_of(rows, groups)
    }
    found = []
    for a in groups:
        for b in groups:
            within = [lines[name] for name in (f"{a}-to-{a}", f"{b}-to-{b}") if name in lines]
            between = lines.get(f"{a}-to-{b}", {})
            places = [place for place in between if within and all(place in own for own in within)]
            if a == b or not places:
                continue
            compared = [(between[place], [own[place] for own in within]) for place in places]
            dearer = sum(all(row["penalty"] > other["penalty"] for other in own) for row, own in compared)
            said = f"{a}-to-{b} costs more than routes within {a} and within {b} at {_of(dearer, len(places), 'site')}"
            if dearer and all(row["interval"] == OVER_MODELS for own in compared for row in (own[0], *own[1])):
                clear = sum(all(row["penalty_low"] > other["penalty_high"] for other in own) for row, own in compared)
                said += f", beyond the intervals over models at {clear}"
            found.append(said)
    return found


def _places(rows: Sequence[Row]) -> str:
    routes = len({(row["model_x"], row["model_y"]) for row in rows})
    return f"{len(rows)} places ({routes} {'route' if routes == 1 else 'routes'})"


def _of(count: int, every: int, what: str) -> str:
    return f"{count} of {every} {what if every == 1 else what + 's'}"
