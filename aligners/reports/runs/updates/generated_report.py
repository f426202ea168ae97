"""Tables of generated text, of injection and of steering: how continuations differ, and some of them to read."""

from collections.abc import Sequence

from aligners.reports.names import aligned, site_name, with_short_names
from aligners.reports.report import Row, by_sites, grouped, site_pairs
from aligners.reports.screen import ROLE_STYLES, SiteTable

FIGURES = {"agreement": ("equal tokens, %", 100, 1), "perplexity": ("perplexity", 1, 2)}


def generation_tables(rows: Sequence[Row], samples: Sequence[Row]) -> list[SiteTable]:
    """Methods down and sites across: agreement with the model's own continuation, and perplexity. Then the samples."""
    tables = []
    for (x, y), panel in grouped(with_short_names(rows), "model_x", "model_y").items():
        pairs = site_pairs(panel)
        names = [site_name(pair) for pair in pairs]
        title = f"Generated, {x if x == y else f'{x} → {y}'}"
        table = SiteTable(title, ["method"], [], {head: names for head, *_ in FIGURES.values()})
        for name, line in grouped(panel, "method").items():
            of = by_sites(line)
            cells = [aligned(scale * of.get(pair, line[0])[column], digits)
                     for column, (_, scale, digits) in FIGURES.items() for pair in pairs]  # fmt: skip
            table.add_row(name, *cells, style=ROLE_STYLES.get(line[0]["role"]))
        tables.append(table)
    for (prompt, y), line in grouped(with_short_names(samples), "prompt", "model_y").items():
        table = SiteTable(
            f"{y} goes on from: {' '.join(prompt.split())}",
            ["method", "site"],
            ["continuation"],
            {},
        )
        table.columns[-1] = table.columns[-1]._replace(right=False)
        for row in line:
            site = "" if row["site_x"] is None else site_name((row["site_x"], row["site_y"]))
            text, style = " ".join(row["continuation"].split()), ROLE_STYLES.get(row["role"])
            table.add_row(row["method"], site, text, style=style)
        tables.append(table)
    return tables
