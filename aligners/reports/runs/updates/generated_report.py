"""Generated text, from injection and from steering: how continuations differ, and samples to read."""

from collections.abc import Sequence
from itertools import product

from aligners.reports.names import (
    aligned,
    route_name,
    site_names,
    site_of,
    span,
    with_short_names,
)
from aligners.reports.report import Row, by_sites, grouped, known, site_pairs, where
from aligners.reports.screen import ROLE_STYLES, SiteTable

FIGURES = {"agreement": ("equal tokens, %", 100, 1), "perplexity": ("perplexity", 1, 2)}


def generation_words(rows: Sequence[Row]) -> list[str]:
    """Say of each target how its own continuations differ from those with states of the other model in place."""
    said = []
    for (x, y), panel in grouped(rows, "model_x", "model_y").items():
        own = where(panel, method="native_y")[0]
        said.append(
            f"{y} was given the first tokens of {own['n_prompts']} held-out texts to continue. Its own continuations "
            f"have a perplexity of {own['perplexity']:.2f} under itself."
        )
        for other in where(panel, method="native_x"):
            said[-1] += (
                f" Those of {x} have the same token at {other['agreement']:.1%} of the places."
            )
        parts = []
        for name, line in grouped(known(panel, "site_x"), "method").items():
            perplexity = span(line, "perplexity", ".2f")
            parts.append(
                f"{name} {span(line, 'agreement', '.1%')} (perplexity {perplexity})"
            )
        if parts:
            same = f"With states of {x} in place the same token stands at:"
            said[-1] += f" {same} {', '.join(parts)}."
    return said


def generation_tables(rows: Sequence[Row], samples: Sequence[Row]) -> list[SiteTable]:
    """Make the tables of agreement with the model's own continuation and of perplexity, and that of samples."""
    tables = []
    for panel in grouped(with_short_names(rows), "model_x", "model_y").values():
        tables.append(_numbers(panel))
    for line in grouped(with_short_names(samples), "prompt", "model_y").values():
        tables.append(_texts(line))
    return tables


def _numbers(panel: list[Row]) -> SiteTable:
    first = panel[0]
    pairs = site_pairs(panel)
    of = route_name(first)
    if first["model_x"] == first["model_y"]:
        of = first["model_x"]
    names = site_names(pairs)
    across = {heading: names for heading, *_ in FIGURES.values()}
    table = SiteTable(f"Generated, {of}", ["method"], [], across)
    for name, line in grouped(panel, "method").items():
        sites = by_sites(line)
        cells = []
        for (column, (_, scale, digits)), pair in product(FIGURES.items(), pairs):
            value = sites.get(pair, line[0])[column]
            cells.append(aligned(scale * value, digits))
        table.add_row(name, *cells, style=ROLE_STYLES.get(line[0]["role"]))
    return table


def _texts(line: list[Row]) -> SiteTable:
    title = f"{line[0]['model_y']} goes on from: {_in_one_line(line[0]['prompt'])}"
    table = SiteTable(title, ["method", "site"], ["continuation"], {})
    table.columns[-1] = table.columns[-1]._replace(right=False)
    for row in line:
        site = "" if row["site_x"] is None else site_of(row)
        text = _in_one_line(row["continuation"])
        table.add_row(row["method"], site, text, style=ROLE_STYLES.get(row["role"]))
    return table


def _in_one_line(text: str) -> str:
    return " ".join(text.split())
