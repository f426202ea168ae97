"""Ren et al. 2023: recovery of a random network, errors from layer to layer, sizes of data, complexity by layer.

The other tables of the paper are those that every study has, with the paper's numbers beside ours: see tables.yaml.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from pandas import DataFrame, Series

from aligners.reports.report import Row
from aligners.reports.study import described_tables, row_selection
from aligners.reports.study.contents import (
    Figure,
    Panel,
    Table,
    heat_panel,
    line_panels,
    look_of_stage,
)
from aligners.reports.study.frames import STATES, Frames, by, kind_words, place_words
from aligners.reports.study.map_tables import (
    WORDS,
    closest_maps,
    map_row,
    printed_of,
    shown_methods,
)
from aligners.reports.study.registry import register
from aligners.reports.study.statistics import over_models

DIRECTIONS = {"forward": "X to f(X)", "backward": "f(X) to X"}


def sizes(frames: Frames, name: str) -> Table:
    """Table 1: how many texts of each task there are for fine-tuning, on which it is watched, and held out."""
    counts = {"n_fit": "fit", "n_validation": "validation", "n_texts": "test"}
    frame = frames.of("finetune", *counts)
    rows = []
    for place, part in by(frame, "task"):
        row = dict(place)
        for column, key in counts.items():
            row[key] = int(part[column].max())
        for split in ("train", "test"):
            printed = described_tables.paper_value(name, split, **place)
            row[f"paper_{split}"] = printed and int(printed.mean)
        rows.append(row)
    return described_tables.table(name, rows)


def recovery(frames: Frames, name: str) -> Table:
    """Table 3: how exactly each map recovers a random invertible network of real states."""
    frame = frames.of("recover", "mse")
    frame = frame.assign(model_y=frame["model_x"])
    methods = frame["method"].unique()
    both_ways = "backward" in set(frame["direction"])
    quantities = (
        "mse",
        "mse_printed",
        "mse_fit",
        "mse_reduced",
        "relative_error",
        "fvu",
    )
    rows = []
    for place, part in by(frame, "strength", "direction", "method"):
        row = map_row(place, part, quantities)
        direction = place["direction"]
        row["paper"] = printed_of(name, "mse", place, methods)
        row["direction"] = DIRECTIONS.get(direction)
        if both_ways and direction == "forward":
            row["paper"] = None  # the paper's is the way back
        rows.append(row)
    closest = closest_maps(rows, "strength", "direction")
    return described_tables.table(
        name, rows, closest=closest, **row_selection.about_maps(frame)
    )


def layer_maps(
    frames: Frames,
    name: str,
    *,
    within: bool,
    component: str = STATES,
    column: str = "fvu",
) -> Figure:
    """Figures 3, 6 and 8: learned error from every layer to every layer, within a model or between models.

    Args:
        frames: frames of the study.
        name: name of the figure.
        within: whether each model is mapped to itself.
        component: what was mapped.
        column: the error.
    """
    whom = "between models"
    if within:
        whom = "within a model"
    errors = _between_layers(frames.errors(component), within, whom)
    panels, values = list[Panel](), list[Row]()
    for title, means in _means_by_layers(errors, column):
        panels.append(heat_panel(title, means, "layer of X", "layer of Y"))
        for (x, y), value in means.items():
            row = {"panel": title, "layer_x": x, "layer_y": y}
            row[column] = value
            values.append(row)
    about: Row = {
        "within": within,
        "whom": whom,
        "what": WORDS[column],
        "models": row_selection.models_in(errors),
    }
    about |= row_selection.about_maps(errors)
    made = described_tables.figure(name, panels, values, **about)
    if made.limits:
        return made
    largest = np.nanmax([row[column] for row in values])
    return replace(made, limits=(float(largest), 0.0))


def _between_layers(errors: DataFrame, within: bool, whom: str) -> DataFrame:
    """Errors of maps between layers, of a model itself or of two models.

    Raises:
        Missing: every map is from a layer to the same layer.
    """
    same_model = errors["model_x"] == errors["model_y"]
    layers = errors["site_x"].notna()
    errors = errors[(same_model == within) & layers]
    lacking = f"no map was fitted from one layer to another {whom}: `data.sites` names such pairs, as 1:2"
    another = errors["site_x"] != errors["site_y"]
    row_selection.present(errors[another], lacking)
    return errors.astype({"site_x": int, "site_y": int})


def _means_by_layers(errors: DataFrame, column: str) -> Iterator[tuple[str, Series]]:
    """Yield, for each place and shown method, a title and the mean error by `site_x` and `site_y`."""
    for place, part in by(errors, "task", "stage", "rows"):
        rows = kind_words(place["rows"])
        for method in shown_methods(part, column, 2):
            line = part[part["method"] == method]
            means = line.groupby(["site_x", "site_y"])[column].mean()
            marked = row_selection.map_cells(method, line)["method"]
            title = place_words(place["task"], place["stage"], rows, marked)
            yield title, means


def nuclear_norms(frames: Frames, name: str) -> Figure:
    """B.2: the nuclear norm of each layer's rows, as its complexity."""
    frame = frames.of("similarity_layers", "nuclear_norm")
    model = frame["model"]
    frame = frame.assign(model_x=model, model_y=model)
    means, values = list[Row](), list[Row]()
    for place, part in by(frame, "task", "stage", "layer"):
        norm = over_models(part, "nuclear_norm")
        if norm:
            means.append({**place, **norm._asdict()})
            values.append({**place, "nuclear_norm": norm.mean})
    panels = line_panels(
        means, ["task"], "stage", "layer", partial(look_of_stage, of_none="all models")
    )
    last = frame.groupby("model")["layer"].max()
    return described_tables.figure(
        name, panels, values, models=model.nunique(), depths=last.nunique()
    )


register(__name__)
