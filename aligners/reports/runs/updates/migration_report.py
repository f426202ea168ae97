"""The report of a migration: whether an index can be used with a new model through a map, and what that costs."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aligners.reports.drawing import dress, method_looks, panels
from aligners.reports.names import fixed, in_words, listed, plain_number, with_interval
from aligners.reports.report import Report, Row, distinct, largest, where
from aligners.reports.screen import SiteTable

ALL = "all"
ROUTES = {
    "queries": "mapped queries over the old index",
    "documents": "new queries over the mapped index",
}
METRICS = {"recall1": "recall@1", "recall10": "recall@10", "ndcg10": "nDCG@10"}
REFERENCES = {"re-embedded": "0.1", "old model": "0.45", "as it is": "0.75"}
PLACES = ".3f"
WIDEST = 1.0  # interval of a share that still tells anything


def report(meta: Row, rows: Sequence[Row], forecasts: Sequence[Row] = ()) -> Report:
    """Make the report.

    Args:
        meta: what holds for all rows.
        rows: one for each route, map, number of pairs and domain, and for what they are compared with.
        forecasts: one for each route and number of pairs, of the chosen map.
    """
    return Report(
        "migration",
        meta,
        rows,
        {"forecasts": forecasts},
        figures={"migration": partial(figure, rows)},
        screen=[_table(meta, rows), _foretold(forecasts)],
        lead=lead(meta, rows),
        sentences=sentences(meta, rows, forecasts),
    )


# ---------------------------------------------------------------------- sentences


def final(rows: Sequence[Row], domain: str = ALL) -> list[Row]:
    """Return the rows of the chosen maps on all pairs, the route that finds most first."""
    of_domain = where(rows, domain=domain, chosen=True)
    most = largest(of_domain, "pairs")
    found = where(of_domain, pairs=most)
    return sorted(found, key=_relative, reverse=True)


def _relative(row: Row) -> float:
    value = row["relative_recall10"]
    return -1.0 if value is None else float(value)


def lead(meta: Row, rows: Sequence[Row]) -> str:
    """Say first whether switching by a map is advised."""
    best = final(rows)[0]
    least = meta["least_recall"]
    route = ROUTES[best["route"]]
    found = (
        f"{best['map']}, {route}, from {plain_number(best['pairs'])} pairs, finds "
        f"{in_words(best, 'relative_recall10', PLACES)} of what re-embedding finds (recall@10)"
    )
    if _relative(best) < least:
        said = f"Switching by a map is not advised: at best, {found}, and {least:g} is asked for."
    else:
        said = f"Switching by a map is possible: {found}; {least:g} is asked for."
    weak = _weak_domains(meta, rows, best)
    if weak:
        said += f" It falls short on {listed(weak)}."
    return said


def _weak_domains(meta: Row, rows: Sequence[Row], best: Row) -> list[str]:
    """Return the domains on which the map is below what is asked for, with their figures."""
    weak: list[str] = []
    if len(meta["domains"]) < 2:
        return weak
    for domain in meta["domains"]:
        for row in where(final(rows, domain), route=best["route"]):
            if _relative(row) >= meta["least_recall"]:
                continue
            held = ", held out" if row["held_out"] else ""
            found = in_words(row, "relative_recall10", PLACES)
            weak.append(f"{domain}{held} ({found})")
    return weak


def sentences(meta: Row, rows: Sequence[Row], forecasts: Sequence[Row]) -> list[str]:
    """Say what is relevant, what the ends are, what was predicted, and what re-embedding takes."""
    said = [_what_is_relevant(meta), _ends(rows)]
    other = final(rows)[1:]
    for row in other:
        said.append(
            f"The other way, {ROUTES[row['route']]}: {row['map']} finds "
            f"{in_words(row, 'relative_recall10', PLACES)} of it."
        )
    said += _predicted(meta, forecasts)
    said.append(_price(meta))
    said += meta.get("serving", [])
    for side in ("old", "new"):
        said += meta[side].get("assumed", [])
    return [line for line in said if line]


def _what_is_relevant(meta: Row) -> str:
    searched = f"{plain_number(meta['queries'])} queries search {plain_number(meta['documents'])} documents"
    if meta["judged"]:
        return f"{searched}; what is relevant was judged."
    return (
        f"{searched}, held-out texts all of them. Nothing is judged: the ten that re-embedding finds count as "
        "relevant, so recall is the overlap with it, and says nothing of which model is right."
    )


def _ends(rows: Sequence[Row]) -> str:
    parts = []
    for name in REFERENCES:
        (row,) = where(rows, map=name, domain=ALL)
        parts.append(f"{_name(name)} {in_words(row, 'recall10', PLACES)}")
    return f"recall@10: {', '.join(parts)}."


def _name(name: str) -> str:
    if name == "as it is":
        return "new queries over the old index as it is"
    return name


def _predicted(meta: Row, forecasts: Sequence[Row]) -> list[str]:
    """Say what was predicted of the largest number of pairs, and whether it came true."""
    if not forecasts:
        return []
    last = where(forecasts, pairs=largest(forecasts, "pairs"))
    parts = []
    said = []
    for row in last:
        route = ROUTES[row["route"]]
        predicted = in_words(row, "predicted_recall10", PLACES)
        realised = fixed(_relative(row), PLACES)
        width = row["predicted_recall10_high"] - row["predicted_recall10_low"]
        if width > WIDEST:
            said.append(
                f"What {route} would find could not be predicted: {plain_number(meta['validation'])} validation texts "
                f"are too few for an index of {plain_number(row['index'])} ({predicted}; found: {realised})."
            )
        else:
            parts.append(f"{predicted} for {route} (found: {realised})")
    if parts:
        said.insert(
            0,
            "Predicted beforehand, from the pairs alone, of recall@10 relative to re-embedding: "
            f"{listed(parts)}.",
        )
    return said


def _price(meta: Row) -> str:
    """Say how long re-embedding takes, and what it costs if an hour has a price."""
    if meta["hours"] is None:
        return "How long re-embedding takes is not known: the new vectors were given."
    size = plain_number(int(meta["index_size"]))
    rate = plain_number(meta["new"]["texts_a_second"])
    hours = plain_number(meta["hours"])
    said = f"Re-embedding {size} documents takes {hours} hours at the {rate} texts a second of this run"
    if meta["price"] is not None:
        said += f", and costs {plain_number(meta['price'])} at {meta['price_per_hour']:g} an hour"
    return f"{said}."


# ---------------------------------------------------------------------- tables


def _table(meta: Row, rows: Sequence[Row]) -> SiteTable:
    """Make the table of all maps on all pairs, and of what they are compared with, for each domain."""
    old, new = (Path(meta[side]["place"]).name for side in ("old", "new"))
    title = (
        f"From {old} to {new}, {plain_number(meta['pairs'])} pairs: what a search finds"
    )
    columns = list(METRICS.values())
    shares = METRICS if meta["judged"] else {}  # else they are shares of re-embedding
    columns += [f"over re-embedding\n{name}" for name in shares.values()]
    table = SiteTable(title, ["queries", "route", "map"], columns, {})
    for domain in distinct(rows, "domain"):
        of_domain = where(rows, domain=domain)
        shown = where(of_domain, pairs=None) + where(of_domain, pairs=meta["pairs"])
        for row in shown:
            named = f"{domain}, held out" if row["held_out"] else domain
            mark = " (chosen)" if row["chosen"] else ""
            cells = [named, row["route"] or "", f"{row['map']}{mark}"]
            cells += [with_interval(row, name, PLACES) for name in METRICS]
            for name in shares:
                cells.append(with_interval(row, f"relative_{name}", PLACES))
            table.add_row(*cells)
    return table


def _foretold(forecasts: Sequence[Row]) -> SiteTable:
    """Make the table of what was predicted and what was found, relative to re-embedding."""
    columns = []
    for name in METRICS.values():
        columns += [f"{name}\npredicted", f"{name}\nfound"]
    title = "Relative to re-embedding: predicted from the pairs alone, and found"
    table = SiteTable(title, ["route", "pairs", "map"], columns, {})
    for row in sorted(forecasts, key=lambda row: (row["route"], row["pairs"])):
        cells = [row["route"], plain_number(row["pairs"]), row["map"]]
        for name in METRICS:
            cells.append(with_interval(row, f"predicted_{name}", PLACES))
            cells.append(with_interval(row, f"relative_{name}", PLACES))
        table.add_row(*cells)
    return table


# ---------------------------------------------------------------------- the figure


def figure(rows: Sequence[Row]) -> Figure:
    """Draw recall@10 against the number of pairs, a panel for each route and domain."""
    domains = distinct(rows, "domain")
    drawn, axes = panels(
        len(domains) * len(ROUTES), len(ROUTES), (3.4, 2.6), (1.9, 0.6), sharey=True
    )
    for place, axis in enumerate(axes):
        domain = domains[place // len(ROUTES)]
        route = list(ROUTES)[place % len(ROUTES)]
        _panel(axis, where(rows, domain=domain), route)
        axis.set_title(f"{ROUTES[route]}\n{domain}", fontsize=8)
    dress(drawn, axes, "pairs that the map is fitted on", "recall@10")
    return drawn


def _panel(axis: Axes, rows: Sequence[Row], route: str) -> None:
    for name, grey in REFERENCES.items():
        for row in where(rows, map=name):
            axis.axhline(row["recall10"], color=grey, linewidth=1, label=_name(name))
    lines = where(rows, route=route)
    looks = method_looks(distinct(lines, "map"))
    for name, look in looks.items():
        line = where(lines, map=name)
        across = [row["pairs"] for row in line]
        bars: list[list[Any]] = [[], []]
        for row in line:
            bars[0].append(max(row["recall10"] - row["recall10_low"], 0))
            bars[1].append(max(row["recall10_high"] - row["recall10"], 0))
        up = [row["recall10"] for row in line]
        axis.errorbar(across, up, yerr=bars, elinewidth=0.8, label=name, **look)
    axis.set_xscale("log")
