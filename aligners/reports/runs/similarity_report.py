"""The report of a comparison of representations: heat maps, lines along matching layers, a table."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aligners.reports import drawing
from aligners.reports.names import (
    WORDS,
    counted,
    file_names,
    listed,
    site_names,
    span,
    with_short_names,
)
from aligners.reports.report import (
    Report,
    Row,
    all_known,
    distinct,
    grouped,
    is_known,
    known,
    models_in,
    numbers,
    values,
    where,
)
from aligners.reports.runs.injection_report import left_out
from aligners.reports.screen import SiteTable
from aligners.similarity.controls import matching_layers

MOST_PAIRS = 12  # of different models, each of which has figures and a table of its own by default
ABREAST = 5
NARROW = 30  # letters that fit below one of so many panels abreast
LARGEST = 14  # inches
CELL, SMALL_CELL = 0.42, 0.27  # inches, with a number in letters of either size
LINES: dict[str, drawing.Look] = drawing.LOOKS["similarity"]
QUIET: drawing.Look = drawing.LOOKS["quiet"]
GREY = "grey: no higher than its null"
HIGHEST_P = 0.05  # of a value that is called higher than its null
BEYOND = "the trained models are more alike than their untrained twins, beyond the 95% interval over texts, by"


def report(
    meta: Row,
    rows: Sequence[Row],
    layers: Sequence[Row],
    distances: Sequence[Row],
    missing: Sequence[Row] = (),
    models: Sequence[Row] = (),
    each_pair: bool | None = None,
) -> Report:
    """Make the report from rows, and from figures of layers and of whole models.

    Args:
        meta: what holds for all rows.
        rows: one for each pair of models, layer pair, measure, direction and kind of features.
        layers: one for each layer of each model: nuclear norm, localization score.
        distances: one for each pair of models of one depth.
        missing: one for each figure of a measure and a pair of models that could not be computed, and why.
        models: one for each model: its sizes.
        each_pair: whether each pair of models has figures and a table of its own; default: up to a dozen pairs.
    """
    shown = with_short_names(rows)
    pairs = _pairs(shown)
    if each_pair is None:
        each_pair = len(pairs) <= MOST_PAIRS
    tables = {"layers": layers, "distances": distances}
    if missing:
        tables["missing"] = missing
    if models:
        tables["models"] = models
    findings = _far_rows(list(grouped(shown, "model_x", "model_y").values()))
    screen = []
    if each_pair:
        screen = [_table(_raw(panel)) for panel in pairs]
        findings += _distances(with_short_names(distances))
    else:
        findings.append(
            f"{len(pairs)} pairs of models: a figure of each measure shows all of them, and similarity.csv has their "
            "rows. `--each_pair true` makes figures and a table of each."
        )
    findings += _null_words(meta, shown)
    return Report(
        "similarity",
        meta,
        rows,
        tables,
        figures=_figures(shown, each_pair),
        screen=screen,
        lead=lead(meta, pairs),
        sentences=findings + left_out(meta),
    )


# ---------------------------------------------------------------------- rows


def _pairs(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each pair of different models."""
    pairs = grouped(rows, "model_x", "model_y")
    return [panel for (x, y), panel in pairs.items() if x != y]


def _layers(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """Return the layers of X and of Y, in order."""
    return sorted(distinct(rows, "layer_x")), sorted(distinct(rows, "layer_y"))


def _raw(rows: Sequence[Row]) -> list[Row]:
    return where(rows, features="raw")


def _at_matching_layers(pairs: Sequence[Sequence[Row]]) -> dict[str, list[Row]]:
    """Return measure -> its values at matching layers of all pairs of models, for raw features."""
    rows = []
    for panel in pairs:
        places = matching_layers(*_layers(panel))
        for row in known(_raw(panel), "value"):
            if (row["layer_x"], row["layer_y"]) in places:
                rows.append(row)
    return grouped(rows, "label")


# ---------------------------------------------------------------------- what is said


def lead(meta: Row, pairs: Sequence[Sequence[Row]]) -> str:
    """Say by which measures trained models are more alike than untrained ones at matching layers.

    Args:
        meta: of the report.
        pairs: the rows of each pair of models, with short names.
    """
    if not pairs:
        return (
            "The layers of each model were compared with each other, and no two models. "
            "The figures and tables have all values."
        )
    lines = _at_matching_layers(pairs)
    first = pairs[0][0]
    who = f"{first['model_x']} and {first['model_y']}"
    if not lines:
        count = counted(len(pairs), "pair")
        return f"Matching layers of {count} of models were compared, but no value is a number."
    if len(pairs) > 1:
        who = f"{len(pairs)} pairs of models"
    count = meta.get("n_rows") or first["n_rows"]
    measures = counted(len(lines), "measure")
    said = f"{who} were compared by {measures} on {count:,} rows of the same held-out texts."

    above, some, below = _beyond_twins(lines)
    controlled = bool(above or some or below)
    if controlled:
        said += f" {_against_twins(above, some, below)}"
    label = [*above, *below, *lines][0]
    return f"{said} {_value(label, lines[label], controlled=controlled)}"


def _beyond_twins(
    lines: Mapping[str, Sequence[Row]],
) -> tuple[list[str], list[str], list[str]]:
    """Return the measures by which trained models exceed untrained twins at every layer, at some, and at none."""
    above = []
    some = []
    below = []
    for label, line in lines.items():
        if not is_known(line, "untrained"):
            continue
        beats = 0
        for row in known(known(line, "untrained"), "low"):
            beats += row["low"] > row["untrained"]
        if beats == len(line):
            above.append(label)
        elif beats:
            some.append(f"{label} ({beats} of {len(line)})")
        else:
            below.append(label)
    return above, some, below


def _against_twins(
    above: Sequence[str], some: Sequence[str], below: Sequence[str]
) -> str:
    """Say at which layers trained models are more alike than untrained twins, by which measures."""
    said = []
    if above:
        said.append(f"At every matching layer {BEYOND} {listed(above)}.")
    if some:
        begins = f"At some matching layers {BEYOND}"
        if above:
            begins = "At some layers they are more alike by"
        said.append(f"{begins} {listed(some)}.")
    if below and said:
        said.append(f"At none are they more alike by {listed(below)}.")
    elif below:
        measure = below[0] if len(below) == 1 else "any measure"
        twins = BEYOND.replace("the trained models are", "are the trained models")
        said.append(f"At no matching layer {twins} {measure}.")
    return " ".join(said)


def _value(label: str, line: Sequence[Row], *, controlled: bool) -> str:
    """State the values of a measure, with those of its controls."""
    text = f"At matching layers {label} is {span(line, 'value', '.2f')}"
    nulls = known(line, "null")
    if nulls and not controlled:  # of recorded states, which have no twins
        null = span(nulls, "null", ".2f")
        return f"{text}, and {null} with the texts permuted."
    if not controlled:
        return (
            f"{text}. A value alone does not say how alike two models are, as untrained ones can have the same: "
            "`--controls true` puts these, permuted texts and intervals beside it."
        )
    controls = known(known(line, "untrained"), "null")
    if controls:
        twins = span(controls, "untrained", ".2f")
        null = span(controls, "null", ".2f")
        text += f", {twins} between untrained twins and {null} with the texts permuted"
    return f"{text}."


def _distances(rows: Sequence[Row]) -> list[str]:
    said = []
    for row in rows:
        models = f"{row['model_x']} and {row['model_y']}"
        distance = f"{row['angular_distance']:.3f}"
        said.append(
            f"Angular distance of {models} (Brown et al., eq. 2), from CKA: {distance}"
        )
    return said


def _null_words(meta: Row, rows: Sequence[Row]) -> list[str]:
    """Say what the p-values are, and how many layer pairs are no higher than their nulls by each measure."""
    draws = meta.get("permutations")
    calibrated = known(known(_raw(rows), "p"), "value")
    if not draws or not calibrated:
        return []
    pairings = counted(draws + 1, "pairing")
    said = [
        f"p is the share of {pairings} of the texts, the true one included, whose value is as high: "
        f'at least {1 / (1 + draws):.2g}. More `--permutations` make it finer. "p, all pairs" is that of the largest '
        "value over the null among all layer pairs."
    ]
    low = []
    for label, measured in grouped(calibrated, "label").items():
        count = 0
        for row in measured:
            count += _is_quiet(row)
        if count:
            low.append(f"{label} ({count} of {len(measured)})")
    if low:
        said.append(
            f"No higher than the null, at some layer pairs: {listed(low)}. Such a value shows no similarity, and is "
            "grey in the tables and figures."
        )
    return said


def _far_rows(pairs: Sequence[Sequence[Row]]) -> list[str]:
    """State the measures at matching layers with rows far from all others, or without them."""
    said = []
    for column, which in {"with_far": "With", "without_far": "Without"}.items():
        each = []
        for label, line in _at_matching_layers(pairs).items():
            beside = known(line, column)
            if beside:
                each.append(
                    f"{label} {span(beside, column, '.3f')} for {span(beside, 'value', '.3f')}"
                )
        if each:
            begins = f"{which} the rows that are far from all others the values at matching layers are"
            said.append(f"{begins} {', '.join(each)}.")
    return said


# ---------------------------------------------------------------------- table


def _table(rows: Sequence[Row]) -> SiteTable:
    """Make the table of a pair of models: measures down, matching layers across, controls below each value."""
    pairs = matching_layers(*_layers(rows))
    title = f"{rows[0]['model_x']} and {rows[0]['model_y']}, matching layers"
    table = SiteTable(title, ["measure", ""], [], {"": site_names(pairs)})
    for measure, measured in grouped(rows, "label").items():
        for column, words in WORDS["similarity"].items():
            cells = {}
            for row in known(measured, column):
                cells[row["layer_x"], row["layer_y"]] = f"{row[column]:.3f}"
            texts = [cells.get(pair, "") for pair in pairs]
            if any(texts):
                style = "dim" if words else None
                quiet = []
                if column == "value":
                    quiet = _no_higher_than_null(measured, pairs)
                table.add_row(measure, words, *texts, style=style, quiet=quiet)
    return table


def _no_higher_than_null(
    rows: Sequence[Row], pairs: Sequence[tuple[int, int]]
) -> list[int]:
    """Return the places, in a row of the table, of values that are no higher than their nulls."""
    places = []
    for place, row in enumerate(_along(rows, pairs)):
        if _is_quiet(row):
            places.append(2 + place)  # after the measure and the control
    return places


def _is_quiet(row: Row) -> bool:
    """Whether some permutation of the texts reaches the value, so that it shows no similarity.

    With 20 permutations or more one in twenty may: p is then at most .05.
    """
    if not all_known([row], "value", "p", "null_high"):
        return False
    return row["value"] <= row["null_high"] and row["p"] > HIGHEST_P


# ---------------------------------------------------------------------- figures


def _figures(rows: Sequence[Row], alone: bool) -> dict[str, Callable[[], Figure]]:
    """List the figures: two for each pair of models; of more than two models, one for each measure."""
    figures: dict[str, Callable[[], Figure]] = {}
    names = file_names(models_in(rows))
    panels = grouped(rows, "model_x", "model_y") if alone else {}
    for (x, y), panel in sorted(
        panels.items(), key=lambda item: item[0][0] == item[0][1]
    ):
        if x != y:
            figures[f"diagonal_{names[x]}_{names[y]}"] = partial(layer_lines, panel)
        figures[f"layers_{names[x]}_{names[y]}"] = partial(pair_map, _raw(panel))
    if len(names) > 2:
        for measure, measured in grouped(_raw(rows), "measure").items():
            figures[f"all_{measure}"] = partial(block_map, measured)
    return figures


def pair_map(rows: Sequence[Row]) -> Figure:
    """Draw every measure between all layers of two models: X's layers up, Y's across, one colour scale from 0 to 1.

    Args:
        rows: those of one pair of models, with raw features.
    """
    measures, (up, across) = grouped(rows, "label"), _layers(rows)
    cell = CELL
    if max(len(up), len(across)) > 8:
        cell = SMALL_CELL
    size = max(1.9, cell * len(across)) + 0.55, max(1.9, cell * len(up)) + 0.75
    figure, axes = drawing.panels(
        len(measures), ABREAST, size, (1.1, 0.5), boxed=True, font=8
    )
    columns = "layer_x", "layer_y", "value"
    words = f"similarity ({GREY})" if any(map(_is_quiet, rows)) else "similarity"
    bar: drawing.Look = {"shrink": 0.6, "pad": 0.01, "label": words}
    drawing.heat_maps(
        axes, measures, measures.values(), columns, up, across, quiet=_is_quiet, **bar
    )
    drawing.label(
        figure, f"layer of {rows[0]['model_y']}", f"layer of {rows[0]['model_x']}"
    )
    return figure


def block_map(rows: Sequence[Row]) -> Figure:
    """Draw one measure between all layers of all models, a block for each pair, as in Wu et al. 2020, Figure 1.

    Entry (a, b) is the similarity of a to b, even if the measure is not symmetric.

    Args:
        rows: those of one measure and all pairs of models, with raw features.
    """
    cells = _both_directions(rows)
    places = _layers_of_models(rows, cells)
    layers = [layer for _, layer in places]
    room = 0.3 * len(places)
    size = min(max(3.5, room), LARGEST)
    figure, (axis,) = drawing.panels(1, 1, (size, size), (1.6, 1.0), boxed=True, font=8)
    columns = "from", "to", "value"
    grid = drawing.layer_grid(cells, columns, places, places)
    quiet = drawing.quiet_cells(cells, columns, places, places, _is_quiet)
    image = drawing.heat_map(axis, grid, layers, layers, quiet=quiet)
    _name_blocks(axis, [model for model, _ in places], crowded=room > LARGEST)
    title = rows[0]["measure"]
    if quiet.any():
        title += f" ({GREY})"
    figure.suptitle(title, fontsize=10)
    words = "similarity of the row's layer to the column's"
    figure.colorbar(image, ax=axis, shrink=0.6, pad=0.08, label=words)
    return figure


def _layers_of_models(
    rows: Sequence[Row], cells: Sequence[Row]
) -> list[tuple[str, int]]:
    """Return all (model, layer) of the cells, model by model in the order of the rows."""
    models = list(dict.fromkeys(models_in(rows)))
    found = {*values(cells, "from"), *values(cells, "to")}
    return sorted(found, key=lambda place: (models.index(place[0]), place[1]))


def _both_directions(rows: Sequence[Row]) -> list[Row]:
    """Return the similarity of each (model, layer) to each other that was measured."""
    cells = []
    for row in rows:
        x = (row["model_x"], row["layer_x"])
        y = (row["model_y"], row["layer_y"])
        if row["direction"] != "backward":
            cells.append(row | {"from": x, "to": y})
        if row["direction"] != "forward":
            cells.append(row | {"from": y, "to": x})
    return cells


def _name_blocks(axis: Axes, models: Sequence[str], *, crowded: bool) -> None:
    """Separate the models by white lines, and name them above and on the right, across their blocks if crowded.

    Args:
        axis: the panel.
        models: models of each layer.
        crowded: whether there is room for short names alone, and none for the numbers of layers.
    """
    if crowded:
        axis.set(xticks=[], yticks=[])
    blocks = Counter(models)
    sizes = np.array(list(blocks.values()))
    ends = np.cumsum(sizes)
    for end in ends[:-1]:
        axis.axhline(end - 0.5, color="w", linewidth=1.5)
        axis.axvline(end - 0.5, color="w", linewidth=1.5)
    middles = ends - sizes / 2 - 0.5
    above = axis.secondary_xaxis("top")
    right = axis.secondary_yaxis("right")
    above.set_xticks(middles, list(blocks), rotation=90 if crowded else 0)
    right.set_yticks(middles, list(blocks), rotation=0 if crowded else 90, va="center")
    above.tick_params(length=0)
    right.tick_params(length=0)


def layer_lines(rows: Sequence[Row]) -> Figure:
    """Draw every measure along matching layers: the value with its interval, and the controls that were computed.

    Args:
        rows: those of one pair of models.
    """
    pairs = matching_layers(*_layers(rows))
    measures = distinct(_raw(rows), "label")
    figure, axes = drawing.panels(
        len(measures), ABREAST, (2.5, 2.1), (1.6, 0.4), font=8, sharex=True, sharey=True
    )
    for axis, measure in zip(axes, measures, strict=True):
        drawing.name_sites(axis, measure, site_names(pairs), NARROW)
        axis.axhline(0, color="0.85", linewidth=0.8, zorder=0)
        _draw_lines(axis, where(rows, label=measure), pairs)
    _name_lines(figure, axes, with_interval=is_known(rows, "low"))
    title = f"{rows[0]['model_x']} and {rows[0]['model_y']}"
    drawing.label(figure, "layer", "similarity", title)
    return figure


def _name_lines(figure: Figure, axes: Sequence[Axes], *, with_interval: bool) -> None:
    handles, labels = drawing.shown_lines(axes)
    value = LINES["value"]["label"]
    if with_interval and value in labels:
        labels[labels.index(value)] += ", 95 % interval"
    figure.legend(handles, labels, loc="outside right center", frameon=False)


def _draw_lines(
    axis: Axes, rows: Sequence[Row], pairs: Sequence[tuple[int, int]]
) -> None:
    """Draw a measure along matching layers, and what it is compared with."""
    across = range(len(pairs))
    line = _along(_raw(rows), pairs)
    if is_known(line, "low"):
        colour = LINES["value"]["color"]
        low, high = numbers(line, "low"), numbers(line, "high")
        axis.vlines(across, low, high, color=colour, alpha=0.4, linewidth=2.5)
    scaled = _along(where(rows, features="standardised"), pairs)
    for name, look in LINES.items():
        heights = numbers(line, name)
        if name == "standardised":
            heights = numbers(scaled, "value")
        if np.isfinite(heights).any():
            axis.plot(across, heights, markersize=3.5, **look)
    quiet = [place for place in across if _is_quiet(line[place])]
    if quiet:
        heights = numbers([line[place] for place in quiet], "value")
        axis.plot(quiet, heights, markersize=4, zorder=4, **QUIET)


def _along(rows: Sequence[Row], pairs: Sequence[tuple[int, int]]) -> list[Row]:
    """Return the row of each pair of layers; an empty one where there is none."""
    places = {(row["layer_x"], row["layer_y"]): row for row in rows}
    return [places.get(pair, {}) for pair in pairs]
