"""What a report says of latents in both models: how much of a change they carry, and what their loss shifts."""

from collections.abc import Sequence
from statistics import median

from aligners.reports.names import (
    aligned,
    percentage,
    plain_number,
    site_name,
    with_interval,
)
from aligners.reports.report import Row, is_known, number, where
from aligners.reports.screen import SiteTable

SHOWN = 20  # latents in the table
NAMED = 5  # latents that a sentence is about
MOST_NARROW = 10  # in their table
NARROW = 3  # latents that are named for what they carry where they fire
MOVED = {
    "first": "first {}",
    "all": "all",
    "reconstruction": "all, and biases",
    "state": "whole state",
}


def effect_sentences(
    meta: Row, rows: Sequence[Row], cumulative: Sequence[Row]
) -> list[str]:
    """Say what the first latents carry of the change, and how alike shifts are where latents are taken out.

    Args:
        meta: what holds for all rows.
        rows: of latents, with short names of models.
        cumulative: of latents that were moved together.
    """
    about = meta.get("effects")
    if not about:
        return []
    if "not_measured" in about:
        return [
            f"What latents do in the models was not measured: {about['not_measured']}."
        ]
    said = []
    if cumulative:
        said.append(_carried(about, cumulative))
    elif about["not_carried"]:
        said.append(
            f"No latent was moved from one model to the other: {about['not_carried']}."
        )
    narrow = _narrow(about, rows)
    if narrow:
        said.append(narrow)
    alike = _alike(rows)
    if alike:
        said.append(alike)
    return said


def _carried(about: Row, cumulative: Sequence[Row]) -> str:
    """Say what the first latents of the best site recover, beside random ones, all, and the whole state."""
    firsts = [
        row
        for row in where(cumulative, moved="first")
        if row["latents"] <= NAMED and row["recovered"] is not None
    ]
    if not firsts:
        return "No latent carries any of the change of the answers."
    best = max(firsts, key=lambda row: row["recovered"])
    place = {name: best[name] for name in ("site_x", "site_y")}
    (every,) = where(cumulative, moved="all", **place)
    (state,) = where(cumulative, moved="state", **place)
    x, y = best["model_x"], best["model_y"]
    divergence = plain_number(about["divergence"], 2)
    latents = (
        "the first latent" if best["latents"] == 1 else f"{best['latents']} latents"
    )
    floor = ""
    if best["random"] is not None:
        floor = f", as many random ones {percentage(best['random'])}"
    return (
        f"Moved from {y}'s states to {x}'s at site {_place(best)}, {latents} recover "
        f"{_share(best)} of the change of the answers ({divergence} nats){floor}, all latents {_share(every)}, "
        f"{y}'s whole state {_share(state)}."
    )


def _by_row(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of latents by what they carry for each row on which they fire, as far as it has an interval."""
    known = [row for row in rows if row.get("attributed_by_row_low") is not None]
    known.sort(key=lambda row: -number(row["attributed_by_row"]))
    return known


def _narrow(about: Row, rows: Sequence[Row]) -> str:
    """Name the latents that carry most of the change where they fire."""
    named = []
    sure = [row for row in _by_row(rows) if row["attributed_by_row_low"] > 0]
    for row in sure[:NARROW]:
        nats = plain_number(row["attributed_by_row"], 2)
        low = plain_number(row["attributed_by_row_low"], 2)
        high = plain_number(row["attributed_by_row_high"], 2)
        tokens = row.get("top_tokens") or "no tokens"
        named.append(
            f"{row['latent']} at site {_place(row)} ({nats} [{low}, {high}]; {tokens})"
        )
    if not named:
        return ""
    mean = plain_number(about["divergence"], 2)
    return (
        f"Where they fire, these latents carry most of the change: {'; '.join(named)}: by number, with nats for each "
        f"row on which it fires, to first order (an answer changes by {mean} in the mean), and its top tokens."
    )


def _share(row: Row) -> str:
    """A share that is recovered, with its interval."""
    if row["recovered_low"] is None:
        return percentage(row["recovered"])
    low = percentage(row["recovered_low"])
    high = percentage(row["recovered_high"])
    return f"{percentage(row['recovered'])} [{low}, {high}]"


def _alike(rows: Sequence[Row]) -> str:
    """Say how alike both models' answers shift where shared and own latents are taken out."""
    parts = []
    for name, verdicts in (("shared", ["shared"]), ("own", ["x", "y"])):
        some = [row for row in rows if row["verdict"] in verdicts]
        known = [row for row in some if row.get("correlation") is not None]
        if known:
            middle = median(row["correlation"] for row in known)
            nulls = [number(row["correlation_null"]) for row in known]
            null = plain_number(median(nulls), 2)
            parts.append(
                f"{plain_number(middle, 2)} for {len(known)} {name} ones (another direction in the same places: {null})"
            )
    if not parts:
        return ""
    return (
        "Where a latent is taken out of both models' states, their answers shift with a median correlation of "
        f"{' and of '.join(parts)}."
    )


def effect_tables(
    rows: Sequence[Row], cumulative: Sequence[Row], words: dict[str, str]
) -> list[SiteTable]:
    """List the latents that carry most of the change, or whose loss was measured, and what they recover together.

    Args:
        rows: of latents, with short names of models.
        cumulative: of latents that were moved together.
        words: what verdicts are called.
    """
    measured = [row for row in rows if row.get("shift_y") is not None]
    if not measured:
        return []
    measured.sort(key=lambda row: -number(row["recovered"] or row["correlation"] or 0))
    headings = [
        "latent",
        "is",
        "recovered, %",
        "attributed, %",
        "nats a row",
        "correlation",
        "null",
    ]
    title = "Latents by what they recover"
    if not is_known(measured, "recovered"):
        title = "Latents by how alike both models' answers shift without them"
    each = SiteTable(title, ["site"], headings, {})
    for row in measured[:SHOWN]:
        shares = [_percent(row["recovered"]), _percent(row["attributed"])]
        shares.append(aligned(row.get("attributed_by_row"), 2))
        alike = [aligned(row["correlation"], 2), aligned(row["correlation_null"], 2)]
        name = words[row["verdict"]]
        each.add_row(_place(row), str(row["latent"]), name, *shares, *alike)
    tables = [each]
    if _by_row(rows):
        tables.append(_table_by_row(_by_row(rows), words))
    if not cumulative:
        return tables
    together = SiteTable(
        "Latents moved together",
        ["site"],
        ["moved", "recovered, %", "random ones, %"],
        {},
    )
    for row in cumulative:
        moved = MOVED[row["moved"]].format(row["latents"])
        figures = _percent(row["recovered"]), _percent(row["random"])
        together.add_row(_place(row), moved, *figures)
    return [*tables, together]


def _table_by_row(rows: Sequence[Row], words: dict[str, str]) -> SiteTable:
    """List the latents that carry most where they fire, for a change of few rows is a small part of all there is."""
    headings = ["latent", "is", "nats a row", "fires, %", "turned", "top tokens"]
    table = SiteTable(
        "Latents by what they carry where they fire", ["site"], headings, {}
    )
    for row in rows[:MOST_NARROW]:
        cells = [
            with_interval(row, "attributed_by_row", ".2f"),
            aligned(100 * row["fired"], 2),
            aligned(row["turned"], 2),
            row.get("top_tokens") or "",
        ]
        table.add_row(_place(row), str(row["latent"]), words[row["verdict"]], *cells)
    return table


def _percent(share: float | None) -> str:
    return aligned(None if share is None else 100 * share, 1)


def _place(row: Row) -> str:
    return site_name((row["site_x"], row["site_y"]))
