"""Ren et al. 2023: recovery of a random network, errors from layer to layer, sizes of data, complexity by layer.

The other tables of the paper are those that every study has, with the paper's numbers beside ours: see tables.yaml.
"""

from dataclasses import replace
from functools import partial

import numpy as np

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
    rows = []
    for place, part in by(frames.of("finetune", *counts), "task"):
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
        row["paper"] = printed_of(name, "mse", place, methods)
        row["direction"] = DIRECTIONS.get(place["direction"])
        if both_ways and place["direction"] == "forward":
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
        frames: of the study.
        name: of the figure.
        within: whether each model is mapped to itself.
        component: what was mapped.
        column: the error.
    """
    whom = "within a model" if within else "between models"
    errors = frames.errors(component)
    same = errors["model_x"] == errors["model_y"]
    errors = errors[(same == within) & errors["site_x"].notna()]
    lacking = f"no map was fitted from one layer to another {whom}: `data.sites` names such pairs, as 1:2"
    row_selection.present(errors[errors["site_x"] != errors["site_y"]], lacking)
    errors = errors.astype({"site_x": int, "site_y": int})
    panels, values = list[Panel](), list[Row]()
    for place, part in by(errors, "task", "stage", "rows"):
        for method in shown_methods(part, column, 2):
            line = part[part["method"] == method]
            means = line.groupby(["site_x", "site_y"])[column].mean()
            marked = row_selection.map_cells(method, line)["method"]
            title = place_words(
                place["task"], place["stage"], kind_words(place["rows"]), marked
            )
            panels.append(heat_panel(title, means, "layer of X", "layer of Y"))
            for (x, y), value in means.items():
                values.append(
                    {"panel": title, "layer_x": x, "layer_y": y, column: value}
                )
    about: Row = {
        "within": within,
        "whom": whom,
        "what": WORDS[column],
        "models": row_selection.models_in(errors),
    }
    made = described_tables.figure(
        name, panels, values, **about, **row_selection.about_maps(errors)
    )
    if made.limits:
        return made
    largest = float(np.nanmax([row[column] for row in values]))
    return replace(made, limits=(largest, 0.0))


def nuclear_norms(frames: Frames, name: str) -> Figure:
    """B.2: the nuclear norm of each layer's rows, as its complexity."""
    frame = frames.of("similarity_layers", "nuclear_norm")
    frame = frame.assign(model_x=frame["model"], model_y=frame["model"])
    means, values = list[Row](), list[Row]()
    for place, part in by(frame, "task", "stage", "layer"):
        norm = over_models(part, "nuclear_norm")
        if norm:
            means.append({**place, **norm._asdict()})
            values.append({**place, "nuclear_norm": norm.mean})
    panels = line_panels(
        means, ["task"], "stage", "layer", partial(look_of_stage, of_none="all models")
    )
    depths = frame.groupby("model")["layer"].max().nunique()
    return described_tables.figure(
        name, panels, values, models=frame["model"].nunique(), depths=depths
    )


register(__name__)
