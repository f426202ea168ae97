"""The sentences of a stitching report: the first ones, and what was found for each method."""

from collections.abc import Sequence
from itertools import combinations
from operator import itemgetter

from aligners.fitting.training_status import is_trained, trained_methods
from aligners.reports.closest import LEAST_NATS
from aligners.reports.names import counted, in_words, plain_score, site_of, span
from aligners.reports.report import (
    Row,
    by_sites,
    distinct,
    grouped,
    known,
    models_in,
    values,
    where,
)

SMALL = 0.01  # nats, and hundredths of the score


def lead(meta: Row, rows: Sequence[Row]) -> str:
    """Say what the first trained layer costs between different models, and of a model stitched to itself.

    Args:
        meta: of the report.
        rows: likewise, with short names of models.
    """
    sound = known(known(rows, "site_x"), "penalty")
    layers = [row for row in sound if row["role"] != "floor"]
    names = trained_methods(layers)[:1]
    line = [row for row in layers if row["method"] in names]
    different = where(line, same_model=False)
    same = where(line, same_model=True)
    if not different:
        return (
            "No stitching layer between different models improved on its start with a finite loss, so none is judged. "
            "The tables have the floors, and the routes of models into themselves."
        )
    unit = "token" if meta.get("unit") == "token" else "text"
    worst = in_words(max(different, key=itemgetter("penalty")), "penalty", ".3f")
    said = (
        f"With a stitching layer ({names[0]}) that was trained on the task's loss, a frozen model goes on from the "
        f"states of a different one with a penalty of {span(different, 'penalty', '.3f')} nats a {unit}, at its worst "
        f"place {worst}."
    )
    if same:
        least = max(map(abs, values(same, "penalty"))) < LEAST_NATS
        cost = span(same, "penalty", ".3f")
        if least:
            cost = "less than 0.001"
        said += f" Of a model stitched to itself, the control, it is {cost} nats."
    return said


def method_words(rows: Sequence[Row], *, directions: bool) -> list[str]:
    """Write a sentence for each finding on a method; none where its layer is not trained.

    They say which direction costs more, whether models stitched to themselves lose anything, and how much of the
    targets' score is kept. Of a route that overflows they say only that it does.

    Args:
        rows: rows of one method and all routes, with short names of models.
        directions: whether to compare the two directions of each pair of models.
    """
    rows = list(filter(is_trained, rows))
    if not rows:
        return []
    sound = known(rows, "penalty")
    different = where(sound, same_model=False)
    said = []
    if len(sound) < len(rows):
        lost = len(rows) - len(sound)
        said.append(
            f"the stitched model gives no finite loss at {lost} of {_places(rows)}."
        )
    if _is_floor(rows):
        if different:
            costs = span(different, "penalty", ".3f")
            said.append(f"between different models the penalty is {costs} nats.")
    else:
        if directions:
            said += _directions(sound)
        said += _beside_themselves(sound)
        said += _score_kept(different)
    return [f"{rows[0]['method']}: {sentence}" for sentence in said]


def _is_floor(rows: Sequence[Row]) -> bool:
    return rows[0]["role"] == "floor"


def _places(rows: Sequence[Row]) -> str:
    routes = counted(len(distinct(rows, "model_x", "model_y")), "route")
    return f"{len(rows)} places ({routes})"


def _directions(rows: Sequence[Row]) -> list[str]:
    """Say for each pair of models which direction costs more, comparing X's site l into Y's m with Y's m into X's l."""
    said = []
    routes = grouped(rows, "model_x", "model_y")
    for x, y in combinations(dict.fromkeys(models_in(rows)), 2):
        back = by_sites(routes.get((y, x), ()))
        both = []
        for (l, m), row in by_sites(routes.get((x, y), ())).items():  # noqa: E741
            if (m, l) in back:
                both.append((row, back[m, l]))
        if not both:
            continue
        turned = [pair[::-1] for pair in both]
        if _dearer(both) < _dearer(turned):
            x, y, both, turned = y, x, turned, both
        diagonal = all(row["site_x"] == row["site_y"] for row, _ in both)
        what = "site" if diagonal else "site pair"
        text = f"{x} → {y} costs more than {y} → {x} at {_dearer(both)} of {counted(len(both), what)}"
        if _dearer(both):
            text += f", beyond the intervals over texts of both at {_beyond(both)}"
        if _beyond(turned):
            text += f"; the reverse costs more beyond both at {_beyond(turned)}"
        said.append(f"{text}.")
    return said


def _dearer(pairs: Sequence[tuple[Row, Row]]) -> int:
    return sum(a["penalty"] > b["penalty"] for a, b in pairs)


def _beyond(pairs: Sequence[tuple[Row, Row]]) -> int:
    return sum(a["penalty_low"] > b["penalty_high"] for a, b in pairs)


def _beside_themselves(rows: Sequence[Row]) -> list[str]:
    """Say what stitching a model to itself costs, and where different models cost more."""
    same = {}
    for row in where(rows, same_model=True):
        if row["site_x"] == row["site_y"]:
            same[row["model_y"], row["site_y"]] = row
    if not same:
        return []
    above = [row for row in same.values() if row["penalty"] > SMALL]
    found = f"no penalty above {SMALL} nats"
    if above:
        found = f"a penalty above {SMALL} nats at {len(above)} of {_places(list(same.values()))}"
    said = [f"stitched to themselves, models have {found}."]
    pairs = []
    for row in where(rows, same_model=False):
        base = same.get((row["model_y"], row["site_y"]))
        if base is not None:
            pairs.append((row, base))
    if pairs:
        places = _places([row for row, _ in pairs])
        said.append(
            f"at {_beyond(pairs)} of {places} a different model costs more than the target stitched to itself, "
            "beyond the intervals over texts of both."
        )
    return said


def _score_kept(different: Sequence[Row]) -> list[str]:
    """Say at how many places a target keeps its score, and where most is lost."""
    scored = known(different, "score_penalty")
    if not scored:
        return []
    kept = [row for row in scored if row["score_penalty"] <= SMALL]
    worst = max(scored, key=itemgetter("score_penalty"))
    name = plain_score(different)
    places = f"{len(kept)} of {_places(scored)}"
    said = (
        f"from a different model the target keeps its {name} within 1 point at {places}"
    )
    if worst["score_penalty"] > 0:
        points = f"{100 * worst['score_penalty']:.1f} points"
        route = f"from {worst['model_x']} to {worst['model_y']} at {site_of(worst)}"
        said += f"; most is lost {route}, {points}"
    return [f"{said}."]
