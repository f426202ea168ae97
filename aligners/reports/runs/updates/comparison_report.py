"""The report of a comparison: what changed from one model to another, where, and on which texts."""

from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aligners.fitting.training_status import beside_far_rows
from aligners.reports.drawing import dress, method_looks, name_sites, panels
from aligners.reports.names import (
    WORDS,
    fixed,
    four_digits,
    in_words,
    percentage,
    plain_number,
    quoted,
    site_names,
    with_short_names,
)
from aligners.reports.report import (
    Report,
    Row,
    grouped,
    is_known,
    numbers,
    site_pairs,
    values,
    where,
)
from aligners.reports.screen import SiteTable

WHAT = WORDS["comparison"]
NAMES = WHAT["maps"]
PANELS = WHAT["panels"]
QUANTITIES = WHAT["quantities"]
ON_WHAT = WHAT[
    "on_what"
]  # a table of what differs -> its title, and its columns of words
LOOKS = {
    "identity": "mlp",
    "rotation": "procrustes",
}  # of maps that look alike in every figure
AFTER = {  # a map
    "identity": "as they are",
    "permutation": "after one permutation of their features",
    "rotation": "after a rotation",
    "linear": "after a linear map",
}
OFTEN, MOST_TYPES = (
    2,
    3,
)  # times the mean of a row, above which a type is named, and how many are
MOST_LATENTS = 3  # named in a sentence
NO_WEIGHTS = (
    "Weights are not compared: the architectures differ, or some are quantised."
)
LOWEST = 1e-16  # of the figure: nothing that float32 leaves is below


def report(
    meta: Row,
    rows: Sequence[Row],
    function: Sequence[Row] = (),
    weights: Sequence[Row] = (),
    floors: Sequence[Row] = (),
    types: Sequence[Row] = (),
    tokens: Sequence[Row] = (),
    texts: Sequence[Row] = (),
    directions: Sequence[Row] = (),
    latents: Sequence[Row] = (),
) -> Report:
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
        latents: of a dictionary of both models, those that the change lies in.
    """
    shown = with_short_names(rows)
    differing = {
        "types": types,
        "tokens": tokens,
        "texts": texts,
        "directions": directions,
    }
    if latents:
        differing["latents"] = latents
    screen = [_sites(shown), *map(_answers, function)]
    if weights:
        screen.append(_weights(weights))
    for name, table in differing.items():
        screen += _on_what(name, table)
    return Report(
        "comparison",
        meta,
        rows,
        {"function": function, "weights": weights, "floors": floors, **differing},
        figures={"comparison": partial(_figure, shown)},
        screen=screen,
        lead=lead(meta, shown, function, types),
        sentences=_on_latents(meta, latents)
        + beside_far_rows(shown)
        + _details(meta, function, weights),
    )


# ---------------------------------------------------------------------- what is said


def lead(
    meta: Row, rows: Sequence[Row], function: Sequence[Row], types: Sequence[Row]
) -> str:
    """Say what has changed, and whether the answers have.

    Args:
        meta: with the verdict.
        rows: rows of the report, as are the others.
        function: of the answers, if they are compared.
        types: types of tokens, those with the largest share of the difference.
    """
    verdict = meta["verdict"]
    answers = _on_answers(function, same=verdict["same_answers"])
    if verdict["kind"] == "changed":
        return f"{_changed(verdict, rows, types)} {answers}"
    return f"{_verdict(meta)} {answers}"


def _verdict(meta: Row) -> str:
    """State a verdict that names no site."""
    kind = meta["verdict"]["kind"]
    map_ = meta["verdict"]["map"]
    if kind == "coordinates" and map_ == "identity":
        return (
            "Only coordinates inside the blocks have changed: all states are the old ones but for rounding, and the "
            "weights that differ have the singular values that they had, as where hidden units are put in another "
            "order or heads are turned."
        )
    coarse = ""
    if meta["precision"] != "float32":
        coarse = f", as far as weights in {meta['precision']} allow"
    after = AFTER.get(map_, "")
    blocks = ", ".join(map(str, meta.get("weights", {}).get("changed", ())))
    sentences = {
        "rounding": (
            "Nothing has changed beyond rounding: at every site the new model has the old one's states"
            + coarse
        ),
        "coordinates": (
            f"Only coordinates have changed: the states differ as they are, and agree at every site {after}, but for "
            "rounding"
        ),
        "weights": (
            "On these texts nothing has changed beyond rounding. But weights differ by more than rounding in block "
            f"{blocks}: what these texts do not excite may have changed"
        ),
        "head": (
            f"The model has changed in its head only: all states agree {after}, but for rounding, and the "
            "answers do not"
        ),
    }
    unlike = (
        "These are different models: no permutation or rotation makes their states agree, even nearly, at the first "
        "site that is compared"
    )
    return sentences.get(kind, unlike) + "."


def _changed(verdict: Row, rows: Sequence[Row], types: Sequence[Row]) -> str:
    """Say from which block on states have changed, where most, on which texts, and by how much."""
    first = verdict["first"]
    most = verdict["most"]
    map_ = verdict["map"]
    place = "the embeddings" if first == 0 else f"block {first}"
    told = f"The model has changed from {place} on"
    if most != first:
        told += f", most at the output of block {most}"
    named = [
        quoted(row["type"]) for row in where(types, site=most) if row["times"] > OFTEN
    ]
    if named:
        told += f", most on tokens such as {', '.join(named[:MOST_TYPES])}"
    worst = where(rows, method=map_, site_y=most)[0]
    left = in_words(worst, "fvu", ".2g")
    told += f". There the old states, {AFTER[map_]}, leave {left} of the variance of the new ones."
    if map_ != "identity":
        nearly = f"before {place}"
        if first == 0:
            nearly = "of the embeddings nearly"
        told += f" Its states are also written in other coordinates: {AFTER[map_]} those {nearly} agree."
    return told


def _on_answers(function: Sequence[Row], *, same: bool) -> str:
    """Say whether the answers differ, how many agree, and how the loss changes."""
    if not function:
        return "Answers are not compared."
    row = function[0]
    changed = "are the old one's but for rounding"
    if not same:
        changed = "differ from the old one's by more than rounding"
    agree = "agree"
    if row["what"] == "similarities of texts":
        agree = "have the same nearest text"
    share = f"{in_words(row, 'agreement', '.2%')} of {row['units']:,} {agree}"
    said = f"The answers of the new model ({row['what']}) {changed}; {share}."
    if row.get("loss_change") is None:
        return said
    old = fixed(row["loss_old"], ".4f")
    new = fixed(row["loss_new"], ".4f")
    if old == new:
        return f"{said} The loss stays at {old} nats."
    change = in_words(row, "loss_change", "+.4f")
    return f"{said} The loss goes from {old} to {new} nats, a change of {change}."


def _on_latents(meta: Row, latents: Sequence[Row]) -> list[str]:
    """Say which latents the change lies in at each site of a dictionary, if one was given."""
    if meta.get("latents_of") is None:
        return []
    if not latents:
        return [
            f"No latent of {meta['latents_of']} explains any of what changed: its latents add the same to both models."
        ]
    said = []
    for site, line in grouped(latents, "site").items():
        named = []
        for row in line[:MOST_LATENTS]:
            tokens = row["top_tokens"] or "no tokens"
            named.append(f"{row['latent']} ({percentage(row['share'])}; {tokens})")
        together = percentage(line[0]["together"])
        said.append(
            f"At site {site} the change lies in latents {'; '.join(named)}: by number, with the share of the squared "
            f"difference that each explains alone, and its top tokens. All latents together explain {together}."
        )
    if meta["verdict"]["map"] not in (None, "identity"):
        said.append(
            "But the new states are also written in other coordinates, and latents are read as both models write them: "
            "their shares are of the difference without a map."
        )
    return said


def _details(meta: Row, function: Sequence[Row], weights: Sequence[Row]) -> list[str]:
    """Say what rounding explains, and what was not compared or fitted, and why."""
    said = []
    for row in function:
        tolerance = fixed(row["tolerance"], ".2g")
        text = f"{row['measure']}: {in_words(row, 'difference', '.2g')}, where rounding explains {tolerance}"
        if not row["same"]:
            text += ": they differ"
        said.append(f"{text}.")
    if meta["not_compared"]:
        said.append(
            f"Answers are not compared: {meta['not_compared']}. The verdict is on states alone."
        )
    rounding = (
        f"What counts as rounding is {plain_number(meta['times'])} times what the old model differs from itself: "
        f"{'; '.join(meta['variants'])}."
    )
    if meta["precision"] != "float32":
        numbers_of = f"All weights of the new model are {meta['precision']} numbers"
        rounding += f" {numbers_of}, so the old one's were rounded likewise."
    said.append(rounding)
    said.append(_on_weights(meta) if weights else NO_WEIGHTS)
    for name, why in meta["refusals"].items():
        said.append(f"No {name} was fitted: {why}")
    return said


def _on_weights(meta: Row) -> str:
    """Say in which blocks weights differ, and what weights cannot tell."""
    verdict = meta["verdict"]
    changed = meta["weights"]["changed"]
    blocks = meta["weights"]["blocks"]
    said = "Weights, compared entry by entry, "
    if not changed:
        return f"{said}do not differ by more than rounding."
    place = f"in block {', '.join(map(str, changed))}"
    if len(changed) >= blocks > 1:
        place = "everywhere"
    said += f"differ by more than rounding {place} (0: embeddings, {blocks + 1}: what comes after the blocks)."
    if verdict["kind"] == "coordinates":
        said += " They see other coordinates as changes: here they are wrong about what the model computes."
    elif verdict["kind"] == "changed" and verdict["map"] == "identity":
        said += " They also see what these texts do not excite, and would see other coordinates as changes."
    elif verdict["kind"] == "changed":
        said += (
            " They cannot tell the change from the other coordinates; the states can."
        )
    return said


# ---------------------------------------------------------------------- tables


def _sites(rows: Sequence[Row]) -> SiteTable:
    title = (
        "FVU: share of the new states' variance that the old states leave unexplained"
    )
    sites = site_names(site_pairs(rows))
    table = SiteTable(title, ["old states"], [], {"site": sites})
    explained: dict[tuple[str, ...], list[str]] = {}
    for method, line in grouped(rows, "method").items():
        name = NAMES.get(method, method)
        table.add_row(name, *map(four_digits, values(line, "fvu")))
        cells = tuple(map(four_digits, values(line, "tolerance")))
        explained.setdefault(cells, []).append(name)
    for cells, names in explained.items():
        heading = "rounding explains"
        if len(explained) > 1:
            heading += f": {', '.join(names)}"
        table.add_row(heading, *cells, style="dim")
    return table


def _answers(row: Row) -> SiteTable:
    title = f"Answers: {row['what']}, {row['units']:,}"
    columns = ["value", "95 % interval"]
    table = SiteTable(title, ["quantity"], columns, {})
    for name, words in QUANTITIES.items():
        if name in row:
            low = four_digits(row[f"{name}_low"])
            high = four_digits(row[f"{name}_high"])
            table.add_row(
                words or row["measure"], four_digits(row[name]), f"[{low}, {high}]"
            )
    table.add_row("rounding explains", four_digits(row["tolerance"]), style="dim")
    return table


def _weights(weights: Sequence[Row]) -> SiteTable:
    """Return the weight of each block that differs most, in units of its tolerance."""
    title = "Weights: relative difference of the one in each block that differs most"
    table = SiteTable(
        title, ["block", "weight"], ["difference", "rounding explains"], {}
    )
    for block, line in sorted(grouped(weights, "block").items()):
        row = max(line, key=lambda row: row["difference"] / row["tolerance"])
        cells = four_digits(row["difference"]), four_digits(row["tolerance"])
        style = None if row["changed"] else "dim"
        table.add_row(str(block), row["weight"], *cells, style=style)
    return table


def _on_what(name: str, rows: Sequence[Row]) -> list[SiteTable]:
    """Make a table for each site of the types, tokens, texts or directions with the largest differences."""
    tables, (title, words) = [], ON_WHAT[name]
    for site, line in grouped(rows, "site").items():
        columns = ["share of it"]
        counted = "times" in line[0]
        if counted:
            columns += ["× mean of a row", "rows"]
        whole = f"{title} with the most of what differs at site {site}"
        table = SiteTable(whole, words, columns, {})
        for row in line:
            cells = [str(row[word]) for word in words] + [percentage(row["share"])]
            if counted:
                cells += [f"{row['times']:.1f}", str(row["rows"])]
            table.add_row(*cells)
        tables.append(table)
    return tables


# ---------------------------------------------------------------------- figure


def _figure(rows: Sequence[Row]) -> Figure:
    """Draw by site what is left of the new states, with what rounding explains as a band, and what it costs."""
    columns = [column for column in PANELS if is_known(rows, column)]
    methods = grouped(rows, "method")
    sites = site_names(site_pairs(rows))
    figure, axes = panels(len(columns), 2, (4.6, 3.3), (1.8, 0.6))
    for axis, column in zip(axes, columns, strict=True):
        lowest = None
        if column == "fvu":
            lowest = LOWEST
            _draw_rounding(axis, next(iter(methods.values())))
        _draw_maps(axis, methods, column)
        axis.set(yscale="log", ylim=(lowest, None))
        title, up = PANELS[column]
        name_sites(axis, title, sites)
        axis.set_ylabel(up, fontsize=9)
    dress(figure, axes, "site (layer)", "")
    return figure


def _draw_rounding(axis: Axes, line: Sequence[Row]) -> None:
    """Draw the band of FVU that rounding explains."""
    band = values(line, "tolerance")
    across = range(len(line))
    axis.fill_between(across, LOWEST, band, color="0.88", label="rounding explains")


def _draw_maps(axis: Axes, methods: Mapping[str, list[Row]], column: str) -> None:
    looks = method_looks([LOOKS.get(name, name) for name in methods])
    for name in reversed(list(methods)):  # as they are on top
        look = looks[LOOKS.get(name, name)]
        heights = numbers(methods[name], column)
        axis.plot(range(len(heights)), heights, label=NAMES.get(name, name), **look)
