"""What the report of an injection says in words: its first sentences, and a paragraph for each panel."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from aligners.fitting.training_status import no_better_than_the_mean, trained_methods
from aligners.reports.closest import (
    LEAST_NATS,
    LEAST_SHARE,
    beside,
    closest,
    known_lines,
    share_range,
    unexplained,
    with_training,
)
from aligners.reports.names import WORDS, fixed, interval_of, listed, value_range
from aligners.reports.report import Row, all_known, grouped, is_known, mean, where

KEPT = 0.015  # an accuracy that loses no more than this counts as kept
VOCABULARY = (
    2.0  # a map whose FVU is this many times higher on unseen types has partly memorised words
)
LEAST_UNSEEN = 0.005  # of an FVU on unseen types that says so, mean over sites
PLAIN = ("linear", "ridge")  # baselines, of which the closer is named
COSTS = ("penalty", "penalty_low", "penalty_high")
ALL_TOKENS = "tokens"
Lines = Mapping[str, Sequence[Row]]  # of methods: name -> rows


def lead(rows: Sequence[Row]) -> str:
    """Say what the first panel found: the target's own answers, bare states, and the closest map.

    Args:
        rows: of the report, with short names of models.
    """
    panel = panels_of(rows)[0]
    native = native_of(panel)
    maps = [row for row in panel if row["site_x"] is not None and row["role"] == "method"]
    near = known_lines(maps, "fvu")
    best = closest(near, "fvu")
    told = ""
    if native["score"] is None and (native["loss"] is None or not of_tokens(panel)):
        x, y = panel[0]["model_x"], panel[0]["model_y"]
        lost = ", whose own answers are not finite" if is_known(panel, "score") else ""
        said = [f"Mapped states of {x} were compared with those of {y}{lost}."]
    elif of_tokens(panel):
        said = _lead_of_tokens(panel, maps)
    else:
        said = _lead_of_task(panel)
        answered = [row for row in near.get(best or "", []) if row["score"] is not None]
        if best is not None and answered:
            told = "It"
            worst = min(answered, key=lambda row: row["score"])
            named = with_training(best, near[best])
            said.append(
                f"Those mapped by {named}, the closest map, give {_score(worst)} at the worst site."
            )
    if best is None:
        return " ".join(
            [
                *said,
                "None of the maps has a finite error at every site, so none is said to be closest.",
            ]
        )
    told = told or f"The closest map, {with_training(best, near[best])},"
    text = (
        f"{told} {unexplained(near[best], of=' of the variance of the states unexplained (FVU)')}"
    )
    if best != "linear" and "linear" in near:
        text += f", {beside('linear', near, best)}"
    return " ".join([*said, f"{text}."])


def _lead_of_tokens(panel: Sequence[Row], maps: Sequence[Row]) -> list[str]:
    """The loss of the target, and what states of the other model cost: as they are, and by the cheapest map."""
    first, native = panel[0], native_of(panel)
    said = f"{first['model_y']} has a loss of {fixed(native['loss'], '.2f')} nats a token with its own states"
    bare = [row for row in where(panel, method="identity") if row["penalty"] is not None]
    said += (
        f"; those of {first['model_x']}, put in as they are, {_raise(bare, '.2f')}."
        if bare
        else "."
    )
    lines = known_lines(maps, "penalty")
    cheap = closest(lines, "penalty")
    if cheap is None:
        return [said]
    worst = max(lines[cheap], key=lambda row: row["penalty"])
    dear = max(abs(row["penalty"]) for row in lines[cheap]) >= LEAST_NATS
    costs = (
        f"raise it by at most {_cost(worst)} nats"
        if dear
        else "change it by less than 0.001 nats at any site"
    )
    text = f"Mapped by {with_training(cheap, lines[cheap])}, which costs the least, they {costs}"
    if not dear:
        text = f"Mapped by {_alike(lines)}, they {costs}"
    elif cheap != "linear" and "linear" in lines:
        text += f"; mapped by linear, by at most {_cost(max(lines['linear'], key=lambda row: row['penalty']))}"
    return [said, f"{text}."]


def _alike(lines: Lines) -> str:
    """The maps whose cost reads as nothing."""
    return listed([with_training(name, line) for name, line in lines.items() if not _costly(line)])


def _costly(line: Sequence[Row]) -> bool:
    return max(abs(row["penalty"]) for row in line) >= LEAST_NATS


def _raise(line: Sequence[Row], form: str) -> str:
    """`raise it by 2.10 to 3.30 nats, depending on the site`; of what reads as nothing, that it changes little."""
    values = [row["penalty"] for row in line]
    least = 0.5 * 10 ** -int(form[1])
    if max(map(abs, values)) < least:
        return f"change it by less than {2 * least:g} nats at any site"
    span = value_range(values, form)
    return f"raise it by {span} nats{', depending on the site' if ' to ' in span else ''}"


def _cost(row: Row) -> str:
    return fixed(row["penalty"], ".3f") + interval_of(row, "penalty", ".3f")


def _lead_of_task(panel: Sequence[Row]) -> list[str]:
    """The score of the target, what is left of it with the other model's states as they are, and what that costs."""
    first, native = panel[0], native_of(panel)
    name = native["score_name"]
    own = f"With its own states {first['model_y']} "
    if name == "accuracy":
        own += f"classifies {_score(native)} of {native['n_texts']:,} held-out texts correctly"
    else:
        own += f"has a {WORDS['scores'][name][0].split(' × ')[0]} of {_score(native)}"
    bare = [row for row in where(panel, method="identity") if row["score"] is not None]
    if bare:
        worst = min(bare, key=lambda row: row["score"])
        own += f", and {_score(worst)} at the worst site with those of {first['model_x']} put in as they are"
        costs = [row for row in bare if row.get("penalty") is not None]
        if costs and _costly(costs):
            dearest = max(costs, key=lambda row: row["penalty"])
            own += f", which costs up to {_cost(dearest)} nats a text"
    return [f"{own}."]


def _score(row: Row) -> str:
    """A score of a task with its interval: a percentage, or a number."""
    form = ".1%" if row["score_name"] == "accuracy" else ".3f"
    return fixed(row["score"], form) + interval_of(row, "score", form)


# ---------------------------------------------------------------------- panels


def panels_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Group the rows by pair of models, direction and kind of rows, in the order of their first appearance."""
    return list(grouped(rows, "model_x", "model_y", "direction", "rows").values())


def of_tokens(panel: Sequence[Row]) -> bool:
    """Tell whether the target is a language model, whose loss is in nats a token."""
    return any(row.get("perplexity") is not None for row in panel)


def panel_title(panel: Sequence[Row]) -> str:
    """Name the models, and the rows if they are not tokens."""
    first = panel[0]
    kind = first.get("rows", ALL_TOKENS)
    return f"{first['model_x']} → {first['model_y']}" + (
        "" if kind == ALL_TOKENS else f", rows: {kind}"
    )


def native_of(panel: Sequence[Row]) -> Row:
    """The row of the target with its own states; one that knows nothing where there is none."""
    known = where(panel, method="native_y")
    return known[0] if known else {"loss": None, "score": None}


def panel_words(panel: Sequence[Row], prices: Sequence[Row], *, begun: bool) -> str:
    """Say of a panel whether the target still does its task, how exact the maps are, and what they have memorised.

    Args:
        panel: its rows.
        prices: of bijectivity, those of its maps.
        begun: whether the report's lead has said some of it.
    """
    scored, tokens, native = is_known(panel, "score"), of_tokens(panel), native_of(panel)
    own = native["loss" if tokens else "score"]
    led = begun and scored and own is not None
    sited = [row for row in panel if row["site_x"] is not None]
    if not scored:
        said = [f"{panel_title(panel)}:"]
    elif own is None:
        said = [
            f"{panel[0]['model_y']}'s own answers are not finite, so injection cannot be scored."
        ]
    else:
        answers = _language(panel, sited, led=led) if tokens else _task(panel, sited, led=led)
        said = [f"{answers}."]
    maps = [row for row in sited if row["role"] == "method"]
    said += _closeness(panel, maps, prices, led=led)
    said += _beyond(maps)
    return " ".join(said)


def _language(panel: Sequence[Row], sited: Sequence[Row], *, led: bool) -> str:
    """What a language model predicts, and what each map costs it, the dearest first."""
    x, y, native = panel[0]["model_x"], panel[0]["model_y"], native_of(panel)
    has = (
        ""
        if led
        else f" has a loss of {fixed(native['loss'], '.2f')} nats a token with its own states, and"
    )
    right = fixed(native["score"], ".1%")
    said = (
        f"{y}{has} predicts {right} of the tokens correctly{' with its own states' if led else ''}"
    )
    known, lost = _answered(sited, "penalty")
    bare = known.get("identity")
    if bare and not led:
        said += (
            f". The states of {x} as they are {_raise(bare, '.3f').replace(' it ', ' the loss ')}"
        )
    names = [name for name in known if known[name][0]["role"] == "method"]
    names.sort(key=lambda name: -mean(known[name], "penalty"))
    costly = [name for name in names if _costly(known[name])]
    free = [name for name in names if name not in costly]
    parts = [
        f"{name} {value_range([row['penalty'] for row in known[name]], '.3f')}" for name in costly
    ]
    if free:
        parts.append(
            f"{'less than 0.001 with ' if parts else 'less than 0.001 nats with '}{listed(free)}"
        )
    if parts:
        begins = "; mapped:" if bare and not led else f". Mapped states of {x} raise the loss by:"
        said += f"{begins} {listed(parts)}"
    alike = [f"{a} and {b}" for a, b in pairwise(costly) if _overlap(known[a], known[b])]
    if alike:
        said += f". Not told apart by their intervals at every site: {'; '.join(alike)}"
    if lost:
        said += f". {listed(lost)} overflowed at some site"
    return said


def _overlap(worse: Sequence[Row], better: Sequence[Row]) -> bool:
    """Tell whether the intervals of two penalties meet at any site."""
    return any(a["penalty_low"] <= b["penalty_high"] for a, b in zip(worse, better, strict=True))


def _answered(sited: Sequence[Row], column: str) -> tuple[dict[str, list[Row]], list[str]]:
    """The trained methods with a value at every site, and the names of those that lack some."""
    names = trained_methods(sited)
    lines = {name: where(sited, method=name) for name in names}
    known = {name: line for name, line in lines.items() if all_known(line, column)}
    return known, [name for name in names if name not in known]


def _task(panel: Sequence[Row], sited: Sequence[Row], *, led: bool) -> str:
    """What a task's score becomes with mapped states: which maps keep it, and how far the others are from it."""
    x, y, native = panel[0]["model_x"], panel[0]["model_y"], native_of(panel)
    name = next((row["score_name"] for row in panel if row.get("score_name")), "accuracy")
    form = ".1%" if name == "accuracy" else ".3f"
    own, said = native["score"], ""
    known, lost = _answered(sited, "score")
    if not led:
        score, bare = fixed(own, form), known.get("identity")
        said = f"{y} classifies {score} of the held-out texts correctly with its own states"
        if name != "accuracy":
            said = f"{y} has a {WORDS['scores'][name][0].split(' × ')[0]} of {score} with its own states"
        if bare:
            said += f" and {value_range([row['score'] for row in bare], form)} when {x}'s states are put in as they are"
    kept, moved = list[str](), list[str]()
    lowered = False
    for method, line in known.items():
        if line[0]["role"] != "method":
            continue
        changes = [row["score"] - own for row in line]
        if max(map(abs, changes)) <= KEPT:
            kept.append(method)
            continue
        lowered = lowered or min(changes) < -KEPT
        moved.append(f"{method} {_points(line, changes)}")
    margin = f"{100 * KEPT:g} points"
    if led and kept:
        said = f"States of {x} mapped by {listed(kept)} keep the score of {y} within {margin} of its own at every site"
    elif led and moved and not lowered:
        said = (
            f"No map of the states of {x} lowers the score of {y} by more than {margin} at any site"
        )
    elif led:
        said = f"No map of the states of {x} keeps the score of {y} within {margin} of its own at every site"
    elif kept:
        said += f"; mapped by {listed(kept)} they keep it within {margin} of that at every site"
    if moved:
        said += f"; it changes with {listed(moved)}"
    if lost:
        said += f"; {listed(lost)} overflowed at some site"
    return said


def _points(line: Sequence[Row], changes: Sequence[float]) -> str:
    """`by -5.0 to +0.0 points, depending on the site (± 2.1)`: no site is picked, and ± is half a score's interval."""
    span = value_range([100 * change for change in changes], "+.1f")
    if not all_known(line, "score_low", "score_high"):
        return f"by {span} points"
    half = max(row["score_high"] - row["score_low"] for row in line) / 2
    sites = ", depending on the site" if " to " in span else ""
    return f"by {span} points{sites} (± {100 * half:.1f})"


def _closeness(
    panel: Sequence[Row], maps: Sequence[Row], prices: Sequence[Row], *, led: bool
) -> list[str]:
    """The closest map beside a plain one, and the price of bijectivity."""
    lines = known_lines(maps, "fvu")
    best = closest(lines, "fvu")
    if best is None:
        return [] if led else ["None of the maps has a finite error at every site."]
    said = ""
    if not led:
        named = with_training(best, lines[best])
        said = f"The closest map, {named}, {unexplained(lines[best], of=' of the variance unexplained')}"
        plain = closest({name: lines[name] for name in PLAIN if name in lines}, "fvu")
        if plain is not None and best not in PLAIN:
            said += f", where {plain} {unexplained(lines[plain])}"
    parts = []
    for (method, against), line in grouped(prices, "method", "against").items():
        parts.append(
            f"{method} {value_range([row['ratio'] for row in line], '.2f')} times {against}"
        )
    if parts:
        price = "price of bijectivity, FVU against a free network of the same size, is"
        said += f"{'The' if led else '; the'} {price} {listed(parts)}"
    return [*([f"{said}."] if said else []), *no_better_than_the_mean(panel)]


def _beyond(maps: Sequence[Row]) -> list[str]:
    """How close the maps are on types that none was fitted on, and on another text; which have memorised words."""
    said, unseen = [], _both(maps)
    best = closest(unseen, "fvu_unseen")
    if best is not None and mean(unseen[best], "fvu_unseen") >= LEAST_SHARE:
        line = unseen[best]
        share = fixed(line[0]["n_unseen"] / line[0]["n_rows"], ".1%")
        named = with_training(best, line)
        said.append(
            f"On types that no map was fitted on, {share} of the rows, {named} is closest and "
            f"{unexplained(line, 'fvu_unseen')}."
        )
    words = []
    for name, line in unseen.items():
        if memorised(mean(line, "fvu_seen"), mean(line, "fvu_unseen")):
            there, here = (
                share_range([row[column] for row in line]) for column in ("fvu_unseen", "fvu_seen")
            )
            words.append(f"{name}, {there} on these types and {here} on types seen in fitting")
    if words:
        said.append(f"Partly memorised words: {'; '.join(words)}.")
    other = known_lines(maps, "fvu_other") if is_known(maps, "fvu_other") else {}
    nearest = closest(other, "fvu_other")
    if nearest is not None:
        line = other[nearest]
        said.append(
            f"On the other text {with_training(nearest, line)} is closest and {unexplained(line, 'fvu_other')}."
        )
    return said


def _both(maps: Sequence[Row]) -> dict[str, list[Row]]:
    """The maps that are measured on seen and on unseen types."""
    if not (is_known(maps, "fvu_seen") and is_known(maps, "fvu_unseen")):
        return {}
    seen, unseen = known_lines(maps, "fvu_seen"), known_lines(maps, "fvu_unseen")
    return {name: line for name, line in unseen.items() if name in seen}


def memorised(seen: float, unseen: float) -> bool:
    """Whether errors on seen and on unseen types say that a map has partly memorised words; small ones do not."""
    return unseen >= LEAST_UNSEEN and unseen >= VOCABULARY * seen
