"""What the report of an injection says in words: its first sentences, and a paragraph for each panel."""

from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter

from aligners.fitting.training_status import no_better_than_the_mean, trained_methods
from aligners.reports.closest import (
    LEAST_NATS,
    LEAST_SHARE,
    Lines,
    beside,
    closest,
    known_lines,
    share_range,
    unexplained,
    with_training,
)
from aligners.reports.names import (
    fixed,
    in_words,
    listed,
    plain_score,
    route_name,
    score_form,
    score_in_words,
    span,
    value_range,
)
from aligners.reports.report import Row, all_known, grouped, is_known, known, mean, values, where

KEPT = 0.015  # an accuracy that loses no more than this counts as kept
VOCABULARY = 2.0  # a map whose FVU is this many times higher on unseen types has memorised words
LEAST_UNSEEN = 0.005  # of an FVU on unseen types that says so, mean over sites
PLAIN = ("linear", "ridge")  # baselines, of which the closer is named
ALL_TOKENS = "tokens"
NONE_CLOSEST = "None of the maps has a finite error at every site, so none is said to be closest."

# ---------------------------------------------------------------------- panels


def panels_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Group the rows by pair of models, direction and kind of rows, in the order of their first appearance."""
    return list(grouped(rows, "model_x", "model_y", "direction", "rows").values())


def panel_title(panel: Sequence[Row]) -> str:
    """Name the models, and the rows if they are not tokens."""
    kind = panel[0].get("rows", ALL_TOKENS)
    title = route_name(panel[0])
    return title if kind == ALL_TOKENS else f"{title}, rows: {kind}"


def of_tokens(panel: Sequence[Row]) -> bool:
    """Tell whether the target is a language model, whose loss is in nats a token."""
    return is_known(panel, "perplexity")


def native_of(panel: Sequence[Row]) -> Row:
    """The row of the target with its own states; one that knows nothing where there is none."""
    rows = where(panel, method="native_y")
    return rows[0] if rows else {"loss": None, "score": None}


def _maps(panel: Sequence[Row]) -> list[Row]:
    return where(known(panel, "site_x"), role="method")


# ---------------------------------------------------------------------- the lead


def lead(rows: Sequence[Row]) -> str:
    """Say what the first panel found: the target's own answers, bare states, and the closest map.

    Args:
        rows: of the report, with short names of models.
    """
    panel = panels_of(rows)[0]
    native, maps = native_of(panel), _maps(panel)
    lines = known_lines(maps, "fvu")
    tokens = of_tokens(panel)
    if native["score"] is None and (native["loss"] is None or not tokens):
        x, y = panel[0]["model_x"], panel[0]["model_y"]
        said = f"Mapped states of {x} were compared with those of {y}"
        if is_known(panel, "score"):
            said += ", whose own answers are not finite"
    elif tokens:
        said = _lead_of_tokens(panel, known_lines(maps, "penalty"))
    else:
        said = _lead_of_task(panel)
    return f"{said}. {_closest_map(lines)}"


def _lead_of_tokens(panel: Sequence[Row], lines: Lines) -> str:
    """The loss of the target, and what states of the other model cost: as they are, and by the cheapest map."""
    x, y = panel[0]["model_x"], panel[0]["model_y"]
    loss = fixed(native_of(panel)["loss"], ".2f")
    said = f"{y} has a loss of {loss} nats a token with its own states"
    bare = known(where(panel, method="identity"), "penalty")
    if bare:
        said += f"; those of {x}, put in as they are, {_raise(bare, 'it', 2)}"
    cheap = closest(lines, "penalty")
    if cheap is None:
        return said
    if not _costly(lines[cheap]):
        free = [with_training(name, line) for name, line in lines.items() if not _costly(line)]
        return (
            f"{said}. Mapped by {listed(free)}, they change it by less than 0.001 nats at any site"
        )
    named = with_training(cheap, lines[cheap])
    said += f". Mapped by {named}, which costs the least, they raise it by at most {_most(lines[cheap])} nats"
    if cheap != "linear" and "linear" in lines:
        said += f"; mapped by linear, by at most {_most(lines['linear'])}"
    return said


def _lead_of_task(panel: Sequence[Row]) -> str:
    """The score of the target, what is left of it with the other model's states as they are, and what that costs."""
    x, y, native = panel[0]["model_x"], panel[0]["model_y"], native_of(panel)
    score = score_in_words(native)
    said = f"With its own states {y} has a {plain_score([native])} of {score}"
    if native["score_name"] == "accuracy":
        texts = f"{native['n_texts']:,} held-out texts"
        said = f"With its own states {y} classifies {score} of {texts} correctly"
    bare = known(where(panel, method="identity"), "score")
    if bare:
        worst = score_in_words(min(bare, key=itemgetter("score")))
        said += f", and {worst} at the worst site with those of {x} put in as they are"
    costs = known(bare, "penalty")
    if costs and _costly(costs):
        said += f", which costs up to {_most(costs)} nats a text"
    return said


def _closest_map(lines: Lines) -> str:
    """How much the closest map leaves unexplained, beside linear, and the score that it gives."""
    best = closest(lines, "fvu")
    if best is None:
        return NONE_CLOSEST
    line = lines[best]
    left = unexplained(line, of=" of the variance of the states unexplained (FVU)")
    said = f"The closest map, {with_training(best, line)}, {left}"
    if best != "linear" and "linear" in lines:
        said += f", {beside('linear', lines, best)}"
    answered = known(line, "score")
    if answered and not of_tokens(line):
        worst = score_in_words(min(answered, key=itemgetter("score")))
        said += f". With states mapped by it, the score is {worst} at the worst site"
    return f"{said}."


def _most(line: Sequence[Row]) -> str:
    """The largest penalty of a map, with its interval."""
    return in_words(max(line, key=itemgetter("penalty")), "penalty", ".3f")


def _costly(line: Sequence[Row]) -> bool:
    return max(map(abs, values(line, "penalty"))) >= LEAST_NATS


def _raise(line: Sequence[Row], what: str, places: int) -> str:
    """`raise it by 2.10 to 3.30 nats, depending on the site`; of what reads as nothing, that it changes little."""
    costs = values(line, "penalty")
    least = 10**-places
    if max(map(abs, costs)) < least / 2:
        return f"change {what} by less than {least:g} nats at any site"
    return f"raise {what} by {_by_site(value_range(costs, f'.{places}f'), 'nats')}"


def _by_site(text: str, unit: str) -> str:
    """A range with its unit, and that it depends on the site if it is one."""
    return f"{text} {unit}, depending on the site" if " to " in text else f"{text} {unit}"


# ---------------------------------------------------------------------- a paragraph for each panel


def panel_words(panel: Sequence[Row], prices: Sequence[Row]) -> str:
    """Say of a panel whether the target still does its task, how exact the maps are, and what they have memorised.

    Args:
        panel: its rows.
        prices: of bijectivity, those of its maps.
    """
    tokens = of_tokens(panel)
    own = native_of(panel)["loss" if tokens else "score"]
    if not is_known(panel, "score"):
        answers = f"{panel_title(panel)}:"
    elif own is None:
        y = panel[0]["model_y"]
        answers = f"{y}'s own answers are not finite, so injection cannot be scored."
    else:
        answers = _language(panel) if tokens else _task(panel)
    maps = _maps(panel)
    said = [answers, _closeness(maps, prices), *no_better_than_the_mean(panel), *_beyond(maps)]
    return " ".join(said)


def _answered(panel: Sequence[Row], column: str) -> tuple[dict[str, list[Row]], str]:
    """The trained methods with a value at every site; and which of them lack some, in words."""
    lines, lost = {}, []
    sited = known(panel, "site_x")
    for name in trained_methods(sited):
        line = where(sited, method=name)
        if all_known(line, column):
            lines[name] = line
        else:
            lost.append(name)
    return lines, f"; {listed(lost)} overflowed at some site" if lost else ""


def _of_role(lines: Lines) -> list[str]:
    """The names of the maps among methods."""
    return [name for name, line in lines.items() if line[0]["role"] == "method"]


def _language(panel: Sequence[Row]) -> str:
    """What a language model predicts, and what each map costs it, the dearest first."""
    x, y, native = panel[0]["model_x"], panel[0]["model_y"], native_of(panel)
    loss, right = fixed(native["loss"], ".2f"), fixed(native["score"], ".1%")
    said = f"{y} has a loss of {loss} nats a token with its own states, and predicts {right} of the tokens correctly."
    lines, lost = _answered(panel, "penalty")
    if "identity" in lines:
        said += f" The states of {x} as they are {_raise(lines['identity'], 'the loss', 3)}."
    names = sorted(_of_role(lines), key=lambda name: -mean(lines[name], "penalty"))
    costly = [name for name in names if _costly(lines[name])]
    free = [name for name in names if name not in costly]
    parts = [f"{name} {span(lines[name], 'penalty', '.3f')}" for name in costly]
    if free:
        parts.append(f"less than 0.001 nats with {listed(free)}")
    if parts:
        said += f" Mapped states of {x} raise the loss by: {listed(parts)}{lost}."
    alike = []
    for worse, better in pairwise(costly):
        if _overlap(lines[worse], lines[better]):
            alike.append(f"{worse} and {better}")
    if alike:
        said += f" Not told apart by their intervals at every site: {'; '.join(alike)}."
    return said


def _overlap(worse: Sequence[Row], better: Sequence[Row]) -> bool:
    """Tell whether the intervals of two penalties meet at any site."""
    pairs = zip(worse, better, strict=True)
    return any(a["penalty_low"] <= b["penalty_high"] for a, b in pairs)


def _task(panel: Sequence[Row]) -> str:
    """What a task's score becomes with mapped states: which maps keep it, and how far the others are from it."""
    x, y, own = panel[0]["model_x"], panel[0]["model_y"], native_of(panel)["score"]
    form = score_form(panel)
    said = f"{y} has a {plain_score(panel)} of {fixed(own, form)} with its own states"
    if form == ".1%":
        said = f"{y} classifies {own:.1%} of the held-out texts correctly with its own states"
    lines, lost = _answered(panel, "score")
    if "identity" in lines:
        bare = span(lines["identity"], "score", form)
        said += f" and {bare} when {x}'s states are put in as they are"
    kept, moved = [], []
    for name in _of_role(lines):
        changes = [row["score"] - own for row in lines[name]]
        if max(map(abs, changes)) <= KEPT:
            kept.append(name)
        else:
            moved.append(f"{name} {_points(lines[name], changes)}")
    if kept:
        margin = f"{100 * KEPT:g} points"
        said += f"; mapped by {listed(kept)} they keep it within {margin} of that at every site"
    if moved:
        said += f"; it changes with {listed(moved)}"
    return f"{said}{lost}."


def _points(line: Sequence[Row], changes: Sequence[float]) -> str:
    """`by -5.0 to +0.0 points, depending on the site (± 2.1)`: no site is picked, and ± is half a score's interval."""
    points = value_range([100 * change for change in changes], "+.1f")
    if not all_known(line, "score_low", "score_high"):
        return f"by {points} points"
    half = max(row["score_high"] - row["score_low"] for row in line) / 2
    return f"by {_by_site(points, 'points')} (± {100 * half:.1f})"


def _closeness(maps: Sequence[Row], prices: Sequence[Row]) -> str:
    """The closest map beside a plain one, and the price of bijectivity."""
    lines = known_lines(maps, "fvu")
    best = closest(lines, "fvu")
    if best is None:
        return "None of the maps has a finite error at every site."
    left = unexplained(lines[best], of=" of the variance unexplained")
    said = f"The closest map, {with_training(best, lines[best])}, {left}"
    plain = closest({name: lines[name] for name in PLAIN if name in lines}, "fvu")
    if plain is not None and best not in PLAIN:
        said += f", where {plain} {unexplained(lines[plain])}"
    parts = []
    for (method, against), line in grouped(prices, "method", "against").items():
        parts.append(f"{method} {span(line, 'ratio', '.2f')} times {against}")
    if parts:
        price = "the price of bijectivity, FVU against a free network of the same size, is"
        said += f"; {price} {listed(parts)}"
    return f"{said}."


def _beyond(maps: Sequence[Row]) -> list[str]:
    """How close the maps are on types that none was fitted on, and on another text; which have memorised words."""
    said = []
    seen, unseen = _lines(maps, "fvu_seen"), _lines(maps, "fvu_unseen")
    unseen = {name: line for name, line in unseen.items() if name in seen}
    best = closest(unseen, "fvu_unseen")
    if best is not None and mean(unseen[best], "fvu_unseen") >= LEAST_SHARE:
        row = unseen[best][0]
        of = f"{fixed(row['n_unseen'] / row['n_rows'], '.1%')} of the rows"
        said.append(
            f"On types that no map was fitted on, {of}, {_nearest(best, unseen, 'fvu_unseen')}"
        )
    parts = []
    for name, line in unseen.items():
        if memorised(mean(line, "fvu_seen"), mean(line, "fvu_unseen")):
            there, here = share_range(line, "fvu_unseen"), share_range(line, "fvu_seen")
            parts.append(f"{name}, {there} on these types and {here} on types seen in fitting")
    if parts:
        said.append(f"Partly memorised words: {'; '.join(parts)}.")
    other = _lines(maps, "fvu_other")
    nearest = closest(other, "fvu_other")
    if nearest is not None:
        said.append(f"On the other text {_nearest(nearest, other, 'fvu_other')}")
    return said


def _lines(maps: Sequence[Row], column: str) -> dict[str, list[Row]]:
    return known_lines(maps, column) if is_known(maps, column) else {}


def _nearest(name: str, lines: Lines, column: str) -> str:
    return f"{with_training(name, lines[name])} is closest and {unexplained(lines[name], column)}."


def memorised(seen: float, unseen: float) -> bool:
    """Whether errors on seen and on unseen types say that a map has partly memorised words; small ones do not."""
    return unseen >= LEAST_UNSEEN and unseen >= VOCABULARY * seen
