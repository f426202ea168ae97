"""The report of what two models share, feature by feature: verdicts, what norms alone say, and the largest latents."""

from collections.abc import Sequence
from functools import partial
from operator import itemgetter

from matplotlib.figure import Figure

from aligners.reports import drawing
from aligners.reports.names import (
    aligned,
    percentage,
    plain_number,
    site_name,
    with_interval,
    with_short_names,
)
from aligners.reports.report import Report, Row, grouped, number, where
from aligners.reports.runs.updates.latent_effects import effect_sentences, effect_tables
from aligners.reports.screen import SiteTable

PANEL = (3.2, 2.6)
MOST_PANELS = 8  # sites; of more, all are in one panel
HIGH = 1.5  # largest ν that is drawn where it is
SHOWN = 10  # latents of each verdict in the tables
COUNTS = ("shared", "x", "y", "undecided", "dead")
COLOURS = {
    "shared": drawing.COLOURS[2],
    "x": drawing.COLOURS[0],
    "y": drawing.COLOURS[1],
    "undecided": "0.75",
}


def report(
    meta: Row, rows: Sequence[Row], sites: Sequence[Row], cumulative: Sequence[Row] = ()
) -> Report:
    """Make the report.

    Args:
        meta: what holds for all rows.
        rows: one for each latent that fired.
        sites: one for each site.
        cumulative: one for each number of latents that were moved from Y to X together.
    """
    tables = {"sites": sites}
    if cumulative:
        tables["cumulative"] = cumulative
    together = with_short_names(cumulative)
    shown = with_short_names(rows)
    by_site = with_short_names(sites)
    words = words_of(by_site[0])
    return Report(
        "features",
        meta,
        rows,
        tables,
        figures={"features": partial(figure, shown, words)},
        screen=[
            _table_of_sites(by_site, words),
            *effect_tables(shown, together, words),
            *_largest(shown, words),
        ],
        lead=lead(meta, by_site, words),
        sentences=[
            *effect_sentences(meta, shown, together),
            *_further(meta, by_site, words),
        ],
    )


def words_of(row: Row) -> dict[str, str]:
    """Call verdicts by the models' short names."""
    return {
        "shared": "shared",
        "x": f"{row['model_x']}'s own",
        "y": f"{row['model_y']}'s own",
        "undecided": "undecided",
        "dead": "dead",
    }


# ---------------------------------------------------------------------- what is said


def lead(meta: Row, sites: Sequence[Row], words: dict[str, str]) -> str:
    """Say what was found, what norms alone would have said, and what is not known.

    Args:
        meta: what holds for all rows.
        sites: rows of sites, with short names of models.
        words: see `words_of`.
    """
    total = {name: sum(row[name] for row in sites) for name in ("live", *COUNTS)}
    places = "1 site" if len(sites) == 1 else f"{len(sites)} sites"
    counts = f"{total['shared']:,} are shared, {total['x']:,} are {words['x']}, {total['y']:,} {words['y']}"
    found = (
        f"Of {total['live']:,} latents that fire on {sites[0]['n_texts']:,} held-out texts, at {places}, {counts} and "
        f"{total['undecided']:,} undecided{_errors(meta, total['x'] + total['y'])}."
    )
    return f"{found} {_by_norms(sites)} {_unknown(sites)}"


def _errors(meta: Row, own: int) -> str:
    """Say how many own latents nothing makes, and what share that is of those found; or that it is not known."""
    if meta.get("false_own") is None:
        return "; how many own ones nothing makes is not known without a same-model control (`--same`)"
    false = plain_number(meta["false_own"], 2)
    said = f"; by the controls the same rule makes about {false} own ones of nothing"
    if not own:
        return said
    share = percentage(meta["error_rate"])
    return f"{said}, a share of {share}"


def _by_norms(sites: Sequence[Row]) -> str:
    """Say what norms alone would call own."""
    by_norm = sum(row["own_by_norm"] for row in sites)
    alone = sum(row["own_by_norm_alone"] for row in sites)
    if not by_norm:
        return "By the norms of decoders alone none would be own."
    return (
        f"By the norms of decoders alone (one at least nine times as long as the other) {by_norm:,} would be own, of "
        f"which {alone:,} do not survive."
    )


def _unknown(sites: Sequence[Row]) -> str:
    """Say what no latent speaks of."""
    parts = []
    for model in "xy":
        left = [row[f"fvu_{model}"] for row in sites if row[f"fvu_{model}"] is not None]
        if left:
            most = percentage(max(left))
            least = percentage(min(left))
            share = most if most == least else f"{least} to {most}"
            parts.append(f"{share} of {sites[0][f'model_{model}']}'s variance")
    return f"Of what the dictionary leaves, {' and '.join(parts)}, nothing is said."


def _further(meta: Row, sites: Sequence[Row], words: dict[str, str]) -> list[str]:
    """Say which latents are dead, and at which site most are own."""
    said = []
    dead = sum(row["dead"] for row in sites)
    latents = sum(row["latents"] for row in sites)
    if dead:
        said.append(
            f"{dead:,} of {latents:,} latents ({percentage(dead / latents)}) never fired on these texts."
        )
    for name in ("x", "y"):
        most = max(sites, key=itemgetter(name))
        if len(sites) > 1 and most[name]:
            place = site_name((most["site_x"], most["site_y"]))
            said.append(f"Most of {words[name]}, {most[name]:,}, are at site {place}.")
    if meta.get("seeds"):
        said.append(
            f"The column `seeds` says in how many of {meta['seeds']} dictionaries of other seeds a latent recurs."
        )
    return said


# ---------------------------------------------------------------------- tables


def _place(row: Row) -> str:
    return site_name((row["site_x"], row["site_y"]))


def _table_of_sites(sites: Sequence[Row], words: dict[str, str]) -> SiteTable:
    """Count the latents of each verdict at each site."""
    models = [sites[0]["model_x"], sites[0]["model_y"]]
    headings = ["fire", *(words[name] for name in COUNTS)]
    groups = {"own by norms alone": ["all", "not own"], "FVU": models}
    table = SiteTable(
        f"Latents of {models[0]} and {models[1]}", ["site"], headings, groups
    )
    for row in sites:
        counts = [row["live"], *(row[name] for name in COUNTS)]
        counts += [row["own_by_norm"], row["own_by_norm_alone"]]
        left = [aligned(row["fvu_x"]), aligned(row["fvu_y"])]
        table.add_row(_place(row), *(f"{count:,}" for count in counts), *left)
    return table


def _largest(rows: Sequence[Row], words: dict[str, str]) -> list[SiteTable]:
    """List the latents of each model's own that add most to its states, and the largest shared ones."""
    tables = []
    for verdict, model in (("y", "y"), ("x", "x"), ("shared", "y")):
        chosen = where(rows, verdict=verdict)
        column = f"variance_{model}"
        chosen.sort(key=lambda row: -number(row[column]))
        if not chosen:
            continue
        title = f"Latents that are {words[verdict]}, by their share of {chosen[0][f'model_{model}']}'s variance"
        headings = [
            "latent",
            "variance, %",
            "fires, %",
            "norm",
            "ν error",
            "ν rebuilt",
            "seeds",
        ]
        table = SiteTable(title, ["site"], headings, {})
        for row in chosen[:SHOWN]:
            table.add_row(_place(row), *_cells(row, column))
        tables.append(table)
    return tables


def _cells(row: Row, column: str) -> list[str]:
    """Write a row of the table of latents."""
    seeds = "" if row["seeds"] is None else str(row["seeds"])
    return [
        str(row["latent"]),
        aligned(100 * number(row[column]), 2),
        aligned(100 * row["fired"], 2),
        aligned(row["norm"], 2),
        with_interval(row, "nu_error", ".2f"),
        with_interval(row, "nu_rebuilt", ".2f"),
        seeds,
    ]


# ---------------------------------------------------------------------- figure


def figure(rows: Sequence[Row], words: dict[str, str]) -> Figure:
    """Draw the larger ν of each latent (up) against its relative norm (across), coloured by verdict, by site."""
    by_site = grouped(rows, "site_x", "site_y")
    if len(by_site) > MOST_PANELS:
        by_site = {"all": list(rows)}
    made, axes = drawing.panels(
        len(by_site), drawing.ABREAST, PANEL, (1.8, 0.8), sharey=True
    )
    for axis, (site, of_site) in zip(axes, by_site.items(), strict=True):
        for verdict, colour in COLOURS.items():
            some = where(of_site, verdict=verdict)
            across = [number(row["norm"]) for row in some]
            up = [_larger(row) for row in some]
            axis.scatter(
                across, up, s=6, color=colour, linewidths=0, label=words[verdict]
            )
        for limit in (0.1, 0.9):
            axis.axvline(limit, color="0.6", linewidth=0.6, zorder=0)
        axis.set_xlim(-0.03, 1.03)
        axis.set_title(
            "all sites" if site == "all" else f"site {site_name(site)}", fontsize=9
        )
    axes[0].set_ylabel("larger of ν error and ν rebuilt")
    drawing.dress(made, axes, "share of Y in the decoder norms", "")
    return made


def _larger(row: Row) -> float:
    """The larger ν of a latent, as far as it is drawn."""
    larger = max(number(row["nu_error"]), number(row["nu_rebuilt"]))
    return min(max(larger, -0.1), HIGH)
