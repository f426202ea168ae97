"""The report of a comparison: what changed from one model to another, where, and on what."""

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure

from aligners.fitting.training_status import beside_far_rows
from aligners.reports.drawing import dress, method_looks, name_sites, panels
from aligners.reports.names import (
    WORDS,
    fixed,
    four_digits,
    interval_of,
    percentage,
    quoted,
    site_name,
    with_short_names,
)
from aligners.reports.report import (
    Report,
    Row,
    distinct,
    grouped,
    is_known,
    number,
    site_pairs,
    where,
)
from aligners.reports.screen import SiteTable
from aligners.reports.templates import sentences

WHAT = WORDS["comparison"]
NAMES, PANELS, QUANTITIES = WHAT["maps"], WHAT["panels"], WHAT["quantities"]
ON_WHAT = WHAT["on_what"]  # a table of what differs -> its title, and its columns of words
LOOKS = {
    "identity": "mlp",
    "rotation": "procrustes",
}  # of other maps, which look alike in every figure
AFTER = {  # a map
    "identity": "as they are",
    "permutation": "after one permutation of their features",
    "rotation": "after a rotation",
    "linear": "after a linear map",
}
OFTEN, MOST_TYPES = 2, 3  # times the mean of a row, above which a type is named, and how many are
LOWEST = 1e-16  # of the figure: nothing that float32 leaves is below


def report(
    meta: Row, rows: Sequence[Row], function: Sequence[Row] = (), weights: Sequence[Row] = (),
    floors: Sequence[Row] = (), types: Sequence[Row] = (), tokens: Sequence[Row] = (), texts: Sequence[Row] = (),
    directions: Sequence[Row] = (),
) -> Report:  # fmt: skip
    """Make the report.

    Args:
        meta: what holds for all rows, the verdict among them.
        rows: one for each map and site pair.
        function: one on the answers, if they are compared.
        weights: one for each weight, if they are compared.
        floors: one for each site, with what each variant of the old model differs from it.
        types: with the most of what differs at a site.
        tokens: likewise.
        texts: likewise.
        directions: of what differs.
    """
    tables = {"function": function, "weights": weights, "floors": floors, "types": types, "tokens": tokens,
              "texts": texts, "directions": directions}  # fmt: skip
    shown, blocks = with_short_names(rows), _by_block(weights)
    on_what = [table for name in ON_WHAT for table in _on_what(name, tables[name])]
    screen = [
        _sites(shown),
        *map(_answers, function),
        *([_weights(blocks)] if blocks else []),
        *on_what,
    ]
    found = sentences("comparison", meta=meta, rows=shown, function=function, blocks=blocks)
    found = [*beside_far_rows(shown), *found]
    figures = {"comparison": partial(_figure, shown)}
    first = lead(meta, shown, function, types)
    return Report(
        "comparison",
        meta,
        rows,
        tables,
        figures=figures,
        screen=screen,
        lead=first,
        sentences=found,
    )


# ---------------------------------------------------------------------- what is said


def lead(meta: Row, rows: Sequence[Row], function: Sequence[Row], types: Sequence[Row]) -> str:
    """Say what has changed, and whether the answers have.

    Args:
        meta: with the verdict.
        rows: of the report, as are the others.
        function: of the answers, if they are compared.
        types: of tokens, those with the largest share of the difference.
    """
    kind, map_ = meta["verdict"]["kind"], meta["verdict"]["map"]
    if kind == "rounding":
        coarse = (
            ""
            if meta["precision"] == "float32"
            else f", as far as weights in {meta['precision']} allow"
        )
        said = f"Nothing has changed beyond rounding: at every site the new model has the old one's states{coarse}."
    elif kind == "coordinates" and map_ == "identity":
        said = (
            "Only coordinates inside the blocks have changed: all states are the old ones but for rounding, and the "
            "weights that differ have the singular values that they had, as where hidden units are put in another "
            "order or heads are turned."
        )
    elif kind == "coordinates":
        said = (
            "Only coordinates have changed: the states differ as they are, and agree at every site "
            f"{AFTER[map_]}, but for rounding."
        )
    elif kind == "weights":
        blocks = ", ".join(map(str, meta["weights"]["changed"]))
        said = (
            f"On these texts nothing has changed beyond rounding. But weights differ by more than rounding in block "
            f"{blocks}: what these texts do not excite may have changed."
        )
    elif kind == "head":
        said = (
            f"The model has changed in its head only: all states agree {AFTER[map_]}, but for rounding, and the "
            "answers do not."
        )
    elif kind == "changed":
        said = _changed(meta["verdict"], rows, types)
    else:
        said = (
            "These are different models: no permutation or rotation makes their states agree, even nearly, at the "
            "first site that is compared."
        )
    return f"{said} {_on_answers(function, same=meta['verdict']['same_answers'])}"


def _changed(verdict: Row, rows: Sequence[Row], types: Sequence[Row]) -> str:
    """From which block on, where the most, on what, and by how much."""
    first, most, map_ = verdict["first"], verdict["most"], verdict["map"]
    place = "the embeddings" if first == 0 else f"block {first}"
    told = f"The model has changed from {place} on"
    if most != first:
        told += f", most at the output of block {most}"
    named = [quoted(row["type"]) for row in types if row["site"] == most and row["times"] > OFTEN]
    if named:
        told += f", most on tokens such as {', '.join(named[:MOST_TYPES])}"
    (worst,) = where(rows, method=map_, site_y=most)[:1]
    left = f"{fixed(worst['fvu'], '.2g')}{interval_of(worst, 'fvu', '.2g')}"
    told += f". There the old states, {AFTER[map_]}, leave {left} of the variance of the new ones."
    if map_ == "identity":
        return told
    nearly = "of the embeddings nearly" if first == 0 else f"before {place}"
    return f"{told} Its states are also written in other coordinates: {AFTER[map_]} those {nearly} agree."


def _on_answers(function: Sequence[Row], *, same: bool) -> str:
    """Whether the answers differ, how many agree, and what that does to the loss."""
    if not function:
        return "Answers are not compared."
    row = function[0]
    changed = (
        "are the old one's but for rounding"
        if same
        else "differ from the old one's by more than rounding"
    )
    agree = "have the same nearest text" if row["what"] == "similarities of texts" else "agree"
    share = f"{fixed(row['agreement'], '.2%')}{interval_of(row, 'agreement', '.2%')}"
    answers = f"The answers of the new model ({row['what']}) {changed}"
    return f"{answers}; {share} of {row['units']:,} {agree}.{_on_loss(row)}"


def _on_loss(row: Row) -> str:
    """` The loss goes from 5.2500 to 5.2515 nats, a change of +0.0015 [+0.0010, +0.0020].`, where there is one."""
    change = row.get("loss_change")
    if change is None:
        return ""
    old, new = fixed(row["loss_old"], ".4f"), fixed(row["loss_new"], ".4f")
    if old == new:
        return f" The loss stays at {old} nats."
    ends = interval_of(row, "loss_change", "+.4f")
    return f" The loss goes from {old} to {new} nats, a change of {fixed(change, '+.4f')}{ends}."


# ---------------------------------------------------------------------- tables


def _by_block(weights: Sequence[Row]) -> list[Row]:
    """The weight of each block that differs most, in units of its tolerance."""
    every = sorted(grouped(weights, "block").items())
    return [max(block, key=lambda row: row["difference"] / row["tolerance"]) for _, block in every]


def _sites(rows: Sequence[Row]) -> SiteTable:
    title = "FVU: share of the new states' variance that the old states leave unexplained"
    table = SiteTable(title, ["old states"], [], {"site": map(site_name, site_pairs(rows))})
    explained: dict[tuple[str, ...], list[str]] = {}
    for name, line in grouped(rows, "method").items():
        table.add_row(NAMES.get(name, name), *(four_digits(row["fvu"]) for row in line))
        explained.setdefault(tuple(four_digits(row["tolerance"]) for row in line), []).append(
            NAMES.get(name, name)
        )
    for cells, names in explained.items():
        alike = "" if len(explained) == 1 else f": {', '.join(names)}"
        table.add_row(f"rounding explains{alike}", *cells, style="dim")
    return table


def _answers(row: Row) -> SiteTable:
    table = SiteTable(
        f"Answers: {row['what']}, {row['units']:,}", ["quantity"], ["value", "95 % interval"], {}
    )
    for name, words in QUANTITIES.items():
        if name in row:
            low, high = (four_digits(row[f"{name}_{end}"]) for end in ("low", "high"))
            table.add_row(words or row["measure"], four_digits(row[name]), f"[{low}, {high}]")
    table.add_row("rounding explains", four_digits(row["tolerance"]), style="dim")
    return table


def _weights(blocks: Sequence[Row]) -> SiteTable:
    title = "Weights: relative difference of the one in each block that differs most"
    table = SiteTable(title, ["block", "weight"], ["difference", "rounding explains"], {})
    for row in blocks:
        cells = (four_digits(row[name]) for name in ("difference", "tolerance"))
        table.add_row(
            str(row["block"]), row["weight"], *cells, style=None if row["changed"] else "dim"
        )
    return table


def _on_what(name: str, rows: Sequence[Row]) -> list[SiteTable]:
    tables, (title, words) = [], ON_WHAT[name]
    for site, part in grouped(rows, "site").items():
        further = ["× mean of a row", "rows"] if "times" in part[0] else []
        whole = f"{title} with the most of what differs at site {site}"
        tables.append(SiteTable(whole, words, ["share of it", *further], {}))
        for row in part:
            cells = [
                percentage(row["share"]),
                *([f"{row['times']:.1f}", str(row["rows"])] if further else []),
            ]
            tables[-1].add_row(*(str(row[word]) for word in words), *cells)
    return tables


def _figure(rows: Sequence[Row]) -> Figure:
    """Draw by site what is left of the new states, with what rounding explains as a band, and what it costs."""
    columns, methods, pairs = (
        [c for c in PANELS if is_known(rows, c)],
        distinct(rows, "method"),
        site_pairs(rows),
    )
    figure, axes = panels(len(columns), 2, (4.6, 3.3), (1.8, 0.6))
    looks = method_looks([LOOKS.get(name, name) for name in methods])
    for axis, column in zip(axes, columns, strict=True):
        if column == "fvu":
            band = [row["tolerance"] for row in where(rows, method=methods[0])]
            axis.fill_between(
                range(len(pairs)), LOWEST, band, color="0.88", label="rounding explains"
            )
        for name in reversed(methods):  # as they are on top
            heights = [number(row[column]) for row in where(rows, method=name)]
            axis.plot(
                range(len(pairs)),
                heights,
                label=NAMES.get(name, name),
                **looks[LOOKS.get(name, name)],
            )
        axis.set(yscale="log", ylim=(LOWEST if column == "fvu" else None, None))
        name_sites(axis, PANELS[column][0], map(site_name, pairs))
        axis.set_ylabel(PANELS[column][1], fontsize=9)
    dress(figure, axes, "site (layer)", "")
    return figure
