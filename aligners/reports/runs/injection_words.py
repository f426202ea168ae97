"""The sentences of an injection's report: the first ones, and a paragraph for each panel."""

from collections.abc import Sequence
from itertools import pairwise

from aligners.fitting.training_status import no_better_than_the_mean, trained_methods
from aligners.reports.closest import (
    LEAST_NATS,
    LEAST_SHARE,
    Lines,
    closest,
    known_lines,
    share_range,
    unexplained,
    with_training,
)
from aligners.reports.names import (
    fixed,
    listed,
    plain_score,
    route_name,
    score_form,
    score_in_words,
    span,
    value_range,
)
from aligners.reports.report import (
    Row,
    all_known,
    grouped,
    is_known,
    known,
    mean,
    values,
    where,
)

KEPT = 0.015  # an accuracy that loses no more than this counts as kept
VOCABULARY = (
    2.0  # a map whose FVU is this many times higher on unseen types has memorised words
)
LEAST_UNSEEN = 0.005  # of an FVU on unseen types that says so, mean over sites
PLAIN = ("linear", "ridge")  # baselines, of which the closer is named
ALL_TOKENS = "tokens"
LEAD = 2  # sentences on the first panel that a report begins with

# ---------------------------------------------------------------------- panels


def panels_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Group the rows by pair of models, direction and kind of rows, in the order of their first appearance."""
    return list(grouped(rows, "model_x", "model_y", "direction", "rows").values())


def panel_title(panel: Sequence[Row]) -> str:
    """Name the models, and the rows if they are not tokens."""
    kind = panel[0].get("rows", ALL_TOKENS)
    title = route_name(panel[0])
    if kind == ALL_TOKENS:
        return title
    return f"{title}, rows: {kind}"


def of_tokens(panel: Sequence[Row]) -> bool:
    """Tell whether the target is a language model, whose loss is in nats a token."""
    return is_known(panel, "perplexity")


def native_of(panel: Sequence[Row]) -> Row:
    """Return the row of the target with its own states; if there is none, a row without values."""
    rows = where(panel, method="native_y")
    return next(iter(rows), {"loss": None, "score": None})


# ---------------------------------------------------------------------- what is said of a panel


def panel_words(panel: Sequence[Row], prices: Sequence[Row]) -> list[str]:
    """Say of a panel what the target answers with mapped states, how exact the maps are, and what they have memorised.

    Args:
        panel: its rows, with short names of models.
        prices: of bijectivity, those of its maps.

    Returns:
        The first `LEAD` are on answers and on the closest map, the others on more.
    """
    native = native_of(panel)
    tokens = of_tokens(panel)
    own = native["loss"] if tokens else native["score"]
    if not is_known(panel, "score"):
        answers = (
            f"{panel_title(panel)}: mapped states were compared with the target's own."
        )
    elif own is None:
        y = panel[0]["model_y"]
        answers = f"{y}'s own answers are not finite, so injection cannot be scored."
    elif tokens:
        answers = _language(panel)
    else:
        answers = _task(panel)
    maps = where(known(panel, "site_x"), role="method")
    return [
        answers,
        _closeness(maps, prices),
        *no_better_than_the_mean(panel),
        *_beyond(maps),
    ]


def _costly(line: Sequence[Row]) -> bool:
    return max(map(abs, values(line, "penalty"))) >= LEAST_NATS


def _raise(line: Sequence[Row]) -> str:
    """`raise the loss by 2.10 to 3.30 nats, depending on the site`; or that they change it by nearly nothing."""
    if not _costly(line):
        return "change the loss by less than 0.001 nats at any site"
    return f"raise the loss by {_by_site(span(line, 'penalty', '.3f'), 'nats')}"


def _by_site(text: str, unit: str) -> str:
    """Write a range with its unit, adding that it depends on the site."""
    if " to " in text:
        unit += ", depending on the site"
    return f"{text} {unit}"


def _answered(panel: Sequence[Row], column: str) -> tuple[dict[str, list[Row]], str]:
    """Return the trained methods with a value at every site, and, in words, those that lack some."""
    lines = {}
    lost = []
    sited = known(panel, "site_x")
    for name in trained_methods(sited):
        line = where(sited, method=name)
        if all_known(line, column):
            lines[name] = line
        else:
            lost.append(name)
    if not lost:
        return lines, ""
    return lines, f"; {listed(lost)} overflowed at some site"


def _of_role(lines: Lines) -> list[str]:
    """Return the names of the maps among methods."""
    return [name for name, line in lines.items() if line[0]["role"] == "method"]


def _language(panel: Sequence[Row]) -> str:
    """Say what a language model predicts, and what each map costs it, the most costly first."""
    x = panel[0]["model_x"]
    y = panel[0]["model_y"]
    native = native_of(panel)
    loss = fixed(native["loss"], ".2f")
    right = fixed(native["score"], ".1%")
    said = f"{y} has a loss of {loss} nats a token with its own states, and predicts {right} of the tokens correctly."
    lines, lost = _answered(panel, "penalty")
    if "identity" in lines:
        said += f" The states of {x} as they are {_raise(lines['identity'])}."
    names = sorted(_of_role(lines), key=lambda name: -mean(lines[name], "penalty"))
    costly = []
    free = []
    parts = []
    for name in names:
        if _costly(lines[name]):
            costly.append(name)
            parts.append(f"{name} {span(lines[name], 'penalty', '.3f')}")
        else:
            free.append(name)
    if free:
        parts.append(f"less than 0.001 with {listed(free)}")
    if parts:
        said += (
            f" Mapped states of {x} raise the loss by (nats): {listed(parts)}{lost}."
        )
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
    """Say how a task's score changes with mapped states: which maps keep it, and what the others lose."""
    x = panel[0]["model_x"]
    y = panel[0]["model_y"]
    native = native_of(panel)
    own = native["score"]
    form = score_form(panel)
    score = score_in_words(native)
    said = f"{y} has a {plain_score(panel)} of {score} with its own states"
    if form == ".1%":
        texts = f"{native['n_texts']:,} held-out texts"
        said = f"{y} classifies {score} of {texts} correctly with its own states"
    lines, lost = _answered(panel, "score")
    if "identity" in lines:
        bare = span(lines["identity"], "score", form)
        said += f" and {bare} when {x}'s states are put in as they are"
    kept = []
    moved = []
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
    """Compare the closest map with a plain one, and give the price of bijectivity."""
    lines = known_lines(maps, "fvu")
    best = closest(lines, "fvu")
    if best is None:
        return "None of the maps has a finite error at every site."
    left = unexplained(lines[best], of=" of the variance unexplained (FVU)")
    said = f"The closest map, {with_training(best, lines[best])}, {left}"
    baselines = {name: lines[name] for name in PLAIN if name in lines}
    plain = closest(baselines, "fvu")
    if plain is not None and best not in PLAIN:
        said += f", where {plain} {unexplained(lines[plain])}"
    parts = []
    for (method, against), line in grouped(prices, "method", "against").items():
        parts.append(f"{method} {span(line, 'ratio', '.2f')} times {against}")
    if parts:
        price = (
            "the price of bijectivity, FVU against a free network of the same size, is"
        )
        said += f"; {price} {listed(parts)}"
    return f"{said}."


def _beyond(maps: Sequence[Row]) -> list[str]:
    """Say how close the maps are on types that none was fitted on, and on another text; and which memorised words."""
    said = []
    seen = _lines(maps, "fvu_seen")
    unseen = _lines(maps, "fvu_unseen")
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
            there = share_range(line, "fvu_unseen")
            here = share_range(line, "fvu_seen")
            parts.append(
                f"{name}, {there} on these types and {here} on types seen in fitting"
            )
    if parts:
        said.append(f"Partly memorised words: {'; '.join(parts)}.")
    other = _lines(maps, "fvu_other")
    nearest = closest(other, "fvu_other")
    if nearest is not None:
        said.append(f"On the other text {_nearest(nearest, other, 'fvu_other')}")
    return said


def _lines(maps: Sequence[Row], column: str) -> dict[str, list[Row]]:
    if not is_known(maps, column):
        return {}
    return known_lines(maps, column)


def _nearest(name: str, lines: Lines, column: str) -> str:
    return f"{with_training(name, lines[name])} is closest and {unexplained(lines[name], column)}."


def memorised(seen: float, unseen: float) -> bool:
    """Tell whether errors on seen and unseen types show that a map has partly memorised words; small errors do not."""
    return unseen >= LEAST_UNSEEN and unseen >= VOCABULARY * seen
