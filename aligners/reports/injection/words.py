"""The findings of an injection in words, computed from its numbers, and the price of bijectivity."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from aligners.fitting.outcomes import is_trained, no_better_than_the_mean, trained_methods, what_did_not_train
from aligners.injection.methods import BOTH_WAYS, TRAINED
from aligners.reports.report import Row
from aligners.reports.words import listed, score_name, score_words, value_range

__all__ = ["below_chance", "of_tokens", "panel_title", "panels_of", "price_of_bijectivity", "reading"]

ALIKE = 0.05  # numbers of parameters within this share count as equal
KEPT = 0.015  # an accuracy that loses no more than this counts as kept
VOCABULARY = 2.0  # a map whose FVU is this many times higher on unseen types is called partly a vocabulary
PLAIN = ("linear", "ridge")  # baselines, of which the closer is named
ALL_TOKENS = "tokens"


def price_of_bijectivity(rows: Sequence[Row]) -> list[Row]:
    """Divide each trained bijection's FVU by that of an unconstrained network of equal size, site by site.

    A bijection is compared in the directions in which it was trained, with networks trained in the same direction. A
    ratio of 1 means that being invertible costs nothing.
    """
    place = ("model_x", "model_y", "direction", "rows", "site_x", "site_y")
    rows = [row for row in rows if is_trained(row)]
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


def below_chance(rows: Sequence[Row]) -> list[Row]:
    """Find models whose own score is below the interval of random labels."""
    found = []
    for panel in panels_of(rows):
        chance = next((row["score_low"] for row in panel if row["method"] == "random_label"), None)
        for row in panel:
            native = row["method"] in ("native_x", "native_y") and row["score"] is not None
            if native and chance is not None and row["score"] < chance:
                model = row["model_x" if row["method"] == "native_x" else "model_y"]
                found.append({"model": model, "method": row["method"], "score": row["score"], "chance_low": chance})
    return list({entry["model"]: entry for entry in found}.values())


def reading(rows: Sequence[Row]) -> str:
    """Say of each panel whether Y still does its task, how exact the maps are, and whether they are vocabularies."""
    said = [*map(_reading, panels_of(rows)), *what_did_not_train(rows)]
    return "\n".join([*map(_warning, below_chance(rows)), *said])


def _warning(entry: Row) -> str:
    return (
        f"Caution: {entry['model']} by itself scores {100 * entry['score']:.1f}, below what random labels get (from "
        f"{100 * entry['chance_low']:.1f}). Its classes may be in another order than the texts' (see `labels` in "
        "report.json; `--data.labels` says which are which), or it was trained on another task."
    )


def panels_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Group the rows by pair of models, direction and kind of rows, in the order of their first appearance."""
    found: dict[tuple[str | None, ...], list[Row]] = {}
    for row in rows:
        key = tuple(row.get(name) for name in ("model_x", "model_y", "direction", "rows"))
        found.setdefault(key, []).append(row)
    return list(found.values())


def of_tokens(panel: Sequence[Row]) -> bool:
    """Tell whether the target is a language model, whose loss is in nats a token."""
    return any(row.get("perplexity") is not None for row in panel)


def panel_title(panel: Sequence[Row]) -> str:
    """Name the models, and the rows if they are not tokens."""
    first = panel[0]
    kind = first.get("rows", ALL_TOKENS)
    return f"{first['model_x']} → {first['model_y']}" + ("" if kind == ALL_TOKENS else f", rows: {kind}")


def _reading(panel: list[Row]) -> str:
    methods = _by_method(panel)
    exactness = _exactness(panel, methods) + _elsewhere(methods)
    if all(row["score"] is None for row in panel):
        return f"{panel_title(panel)}: {exactness}"
    behaviour = _penalties(panel, methods) if of_tokens(panel) else _behaviour(panel, methods)
    return f"{behaviour}. {exactness}"


def _behaviour(panel: list[Row], methods: dict[str, list[Row]]) -> str:
    source, target = panel[0]["model_x"], panel[0]["model_y"]
    native = next(row["score"] for row in panel if row["method"] == "native_y")
    if native is None:
        return f"{target}'s own answers are not finite, so that there is nothing to keep"
    form = ".1%" if score_name(panel) == "accuracy" else ".3f"
    behaviour = f"{target} has a {score_words(panel).split(' × ')[0]} of {native:{form}} on its own"
    if form == ".1%":
        behaviour = f"{target} answers {native:.1%} of the held-out texts rightly on its own"
    accuracies = {name: [row["score"] for row in line] for name, line in methods.items()}
    kept = {name: values for name, values in accuracies.items() if None not in values}
    if "identity" in kept:
        behaviour += f" and {value_range(kept['identity'], form)} when {source}'s states are put in as they are"
    gaps = {name: min(kept[name]) - native for name in kept if methods[name][0]["role"] == "method"}
    most = {name: max(kept[name]) - native for name in gaps}
    good = [name for name, gap in gaps.items() if gap >= -KEPT and most[name] <= KEPT]
    better = [
        f"{100 * most[name]:.1f} points with {name}" for name, gap in gaps.items() if gap >= -KEPT and most[name] > KEPT
    ]
    worse = [f"{-100 * gap:.1f} points with {name}" for name, gap in gaps.items() if gap < -KEPT]
    if good:
        behaviour += f"; mapped by {listed(good)} they keep it within {100 * KEPT:g} points of that at every site"
    if better:
        behaviour += f"; the best site gains {listed(better)}"
    if worse:
        behaviour += f"; the worst site loses {listed(worse)}"
    lost = [name for name in accuracies if name not in kept]
    return behaviour + (f"; {listed(lost)} overflowed at some site" if lost else "")


def _penalties(panel: list[Row], methods: dict[str, list[Row]]) -> str:
    """Say what injection costs a language model, map by map, and which maps the intervals do not tell apart."""
    source, target = panel[0]["model_x"], panel[0]["model_y"]
    native = next(row for row in panel if row["method"] == "native_y")
    if native["loss"] is None:
        return f"{target}'s own answers are not finite, so that there is nothing to keep"
    own = f"{native['loss']:.2f} nats a token on its own, {native['score']:.1%} of them right"
    said = f"{target} loses {own}"
    known = {name: line for name, line in methods.items() if all(row["penalty"] is not None for row in line)}
    if "identity" in known:
        said += f". {source}'s states as they are cost {_nats(known['identity'])} more"
    maps = [name for name, line in known.items() if line[0]["role"] == "method"]
    maps.sort(key=lambda name: _total(known[name], "penalty"), reverse=True)
    if maps:
        said += f"; mapped, {listed([f'{name} {_nats(known[name])}' for name in maps])}"
    alike = [f"{a} and {b}" for a, b in pairwise(maps) if _overlap(known[a], known[b])]
    if alike:
        said += f". Not told apart by their intervals at every site: {'; '.join(alike)}"
    lost = [name for name in methods if name not in known]
    return said + (f". {listed(lost)} overflowed at some site" if lost else "")


def _overlap(worse: list[Row], better: list[Row]) -> bool:
    """Tell whether the intervals of two penalties meet at any site."""
    return any(a["penalty_low"] <= b["penalty_high"] for a, b in zip(worse, better, strict=True))


def _nats(line: list[Row]) -> str:
    return value_range([row["penalty"] for row in line], ".3f")


def _exactness(rows: list[Row], methods: dict[str, list[Row]]) -> str:
    """Say how much variance the closest trained map and the plain one leave, and the price of bijectivity."""
    mapped = _measured(methods, "fvu")
    if not mapped:
        return "No map that is trained at every site was evaluated."
    best = _closest(mapped, "fvu")
    said = f"The closest map, {best}, {_leaves(mapped[best], 'fvu', ' of the variance unexplained')}"
    plain = {name: mapped[name] for name in PLAIN if name in mapped}
    if plain and best not in PLAIN:
        baseline = _closest(plain, "fvu")
        said += f", where {baseline} {_leaves(plain[baseline], 'fvu')}"
    prices: dict[tuple[str, str], list[float]] = {}
    for entry in price_of_bijectivity(rows):
        prices.setdefault((entry["method"], entry["against"]), []).append(entry["ratio"])
    if prices:
        each = [f"{name} {value_range(ratios, '.2f')} times {against}" for (name, against), ratios in prices.items()]
        said += f"; the price of bijectivity, FVU against a free network of the same size, is {listed(each)}"
    return " ".join([f"{said}.", *no_better_than_the_mean(rows)])


def _leaves(line: list[Row], column: str, of: str = "") -> str:
    """Say what share of the variance a map leaves, or that the mean would do no worse."""
    if min(row[column] for row in line) >= 1:
        return f"is no better than the mean: its FVU is {value_range([row[column] for row in line], '.3g')}"
    return f"leaves {_percentages(line, column)}{of}"


def _elsewhere(methods: dict[str, list[Row]]) -> str:
    """Say what was measured on rows of types that no map saw, and on other text."""
    said = ""
    if known := _measured(methods, "fvu_seen", "fvu_unseen"):
        best = _closest(known, "fvu_unseen")
        share = known[best][0]["n_unseen"] / known[best][0]["n_rows"]
        said += (
            f" On types that no map saw, {share:.1%} of the rows, {best} is closest and "
            f"{_leaves(known[best], 'fvu_unseen')}."
        )
        words = [
            f"{name}, {_percentages(line, 'fvu_unseen')} there and {_percentages(line, 'fvu_seen')} on types it saw"
            for name, line in known.items()
            if _total(line, "fvu_unseen") >= VOCABULARY * _total(line, "fvu_seen")
        ]
        said += f" Partly a vocabulary: {'; '.join(words)}." if words else ""
    if known := _measured(methods, "fvu_other"):
        best = _closest(known, "fvu_other")
        said += f" On the other text {best} is closest and {_leaves(known[best], 'fvu_other')}."
    return said


def _measured(methods: dict[str, list[Row]], *columns: str) -> dict[str, list[Row]]:
    """Select the maps that have a value in these columns at every site."""
    return {
        name: line
        for name, line in methods.items()
        if line[0]["role"] == "method" and all(row.get(column) is not None for row in line for column in columns)
    }


def _closest(methods: dict[str, list[Row]], column: str) -> str:
    return min(methods, key=lambda name: _total(methods[name], column))


def _total(line: list[Row], column: str) -> float:
    return sum(row[column] for row in line)


def _percentages(line: list[Row], column: str) -> str:
    return value_range([row[column] for row in line], ".1%")


def _by_method(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of each method that has sites, without those of maps that are not trained at all of them."""
    names = trained_methods([row for row in rows if row["site_x"] is not None])
    return {name: [row for row in rows if row["method"] == name] for name in names}
