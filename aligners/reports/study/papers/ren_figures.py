"""The figures of Ren et al. 2023: errors by layer, layer by layer, and the complexity of layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from aligners.fitting.outcomes import MARK
from aligners.reports.names import site_name
from aligners.reports.report import Row
from aligners.reports.study.contents import BoxPanel, Figure, HeatPanel, LinePanel, Meaning, Missing, Series
from aligners.reports.study.estimates import Estimate, over_models, pair_means
from aligners.reports.study.frames import ATTENTION, STATES, Frames, by, in_order, kind_words, place_words, stage_words
from aligners.reports.study.papers.choosing import HELD_OUT, between_models, blocks, map_cells, trained, untrained_said
from aligners.reports.study.papers.numbers import paper_note

__all__ = ["attention_by_layer", "errors_by_layer", "layer_maps", "nuclear_norms"]

SHOWN = (("inn", "inn_paper"), ("linear",), ("mlp", "mlp_paper"))  # the first of each that there is
FIGURES = {"ren_figure_2": "Figures 2, 5a and 7", "ren_figure_4": "Figures 4 and 5b"}
WORDS = {"mse": "mean squared error", "fvu": "FVU", "relative_error": "relative error"}


def errors_by_layer(
    frames: Frames,
    column: str = "mse",
    name: str = "ren_figure_2",
    component: str = STATES,
    paper: str = "ren_figure_2",
) -> Figure:
    """Ren et al., Figures 2, 5a and 7: errors at each layer, a box over pairs of models, before and after fine-tuning.

    Args:
        frames: of the study.
        column: the error.
        name: of the figure.
        component: what was mapped.
        paper: entry of the papers' numbers.
    """
    errors = blocks(between_models(frames.errors(component)))
    if component == ATTENTION:
        errors = errors.assign(rows=None)  # of one kind, which the title names
    panels, values = [], []
    for (task, kind), own in by(errors[errors["site_x"].notna()], "task", "rows"):
        for method in shown_methods(own, column):
            line = own[own["method"] == method]
            cells = map_cells(method, line)
            panels.append(_boxes(line, column, place_words(task, kind_words(kind), str(cells["method"]))))
            values += _box_values(line, column, {"task": task, "rows": kind, **cells})
    if not panels:
        raise Missing("no map was fitted between models at the same site")
    said, what = _trend(values, column), WORDS[column]
    return Figure(
        name,
        f"{what[:1].upper()}{what[1:]} by layer, of {component} (Ren et al., {FIGURES[paper]})",
        _boxes_caption(errors, column) + _left_out(errors, values),
        f"Box plots of the {what} at each layer, one panel for each task and map. {said}".strip(),
        panels,
        what,
        values=values,
        notes=[HELD_OUT[bool(errors["held_out"].all())], *untrained_said(errors), paper_note(paper)],
        findings=[said] if said else [],
    )


def _boxes_caption(errors: pd.DataFrame, column: str) -> str:
    stages = [stage_words(stage) for stage in in_order(list(errors["stage"])) if stage is not None and stage == stage]
    return (
        f"The {WORDS[column]} of maps between two models at each layer: a box over {len(pair_means(errors, column))} "
        f"pairs of models{', ' if stages else ''}{' and '.join(stages)} (median, quartiles, whiskers to 1.5 times "
        "their distance)."
    )


def attention_by_layer(frames: Frames) -> Figure:
    """Ren et al., Figures 4 and 5b: the same of attention weights."""
    return errors_by_layer(frames, "mse", "ren_figure_4", ATTENTION, "ren_figure_4")


def layer_maps(frames: Frames, *, within: bool) -> Figure:
    """Ren et al., Figures 3, 6 and 8: learned error from every layer to every layer, within and between models.

    Args:
        frames: of the study.
        within: from a model to itself, or to others.
    """
    errors, whom = _layer_errors(frames, within=within)
    panels, values = [], []
    for (task, stage, kind), own in by(errors, "task", "stage", "rows"):
        for method in shown_methods(own, "fvu", 2):
            line = own[own["method"] == method]
            title = place_words(task, stage, kind_words(kind), str(map_cells(method, line)["method"]))
            panels.append(_layer_map(line, title))
            values += [{"panel": title, "layer_x": a, "layer_y": b, "fvu": value} for a, b, value in _cells(line)]
    models = len(set(errors["model_x"]) | set(errors["model_y"]))
    over = f"{models} models" if within else f"the pairs of {models} models"
    return Figure(
        "ren_figure_3" if within else "ren_figure_6",
        f"Error from layer to layer, {whom} (Ren et al., Figure{' 3' if within else 's 6 and 8'})",
        f"FVU of the map from each layer of X (up) to each of Y (across), mean over {over}; "
        "brighter is closer, 1 is no better than the mean.",
        f"Heat maps of FVU between all layers {whom}, one for each task, stage and map.",
        panels,
        "FVU",
        limits=(1.0, 0.0),
        values=values,
        notes=[HELD_OUT[bool(errors["held_out"].all())], *untrained_said(errors)],
    )


def _layer_errors(frames: Frames, *, within: bool) -> tuple[pd.DataFrame, str]:
    """Errors within or between models, some of them between different layers."""
    errors, whom = frames.errors(), "within a model" if within else "between models"
    errors = errors[((errors["model_x"] == errors["model_y"]) == within) & errors["site_x"].notna()]
    if errors.empty or bool((errors["site_x"] == errors["site_y"]).all()):
        raise Missing(f"no map was fitted from one layer to another {whom}: `data.sites` names such pairs, as 1:2")
    return errors, whom


def nuclear_norms(frames: Frames) -> Figure:
    """Ren et al., B.2: the nuclear norm of each layer's rows, as its complexity."""
    frame = frames.of("similarity_layers", "nuclear_norm")
    frame = frame.assign(model_x=frame["model"], model_y=frame["model"])
    panels, values = [], []
    for (task,), own in by(frame, "task"):
        layers = sorted(own["layer"].unique())
        series = []
        for (stage,), line in by(own, "stage"):
            each = [over_models(line[line["layer"] == layer], "nuclear_norm") for layer in layers]
            series.append(estimates_line(stage_words(stage) or "all models", ("stage", str(stage)), each))
            means = [None if found is None else found.mean for found in each]
            values += [{"task": task, "stage": stage, "layer": int(layer), "nuclear_norm": mean}
                       for layer, mean in zip(layers, means, strict=True)]  # fmt: skip
        panels.append(LinePanel(place_words(task), [str(layer) for layer in layers], series))
    depths = frame.groupby("model")["layer"].max().nunique()
    return Figure(
        "ren_nuclear_norm",
        "Nuclear norm by layer (Ren et al., B.2)",
        f"Sum of the singular values of each layer's centred rows, mean over {frame['model'].nunique()} models with "
        "the 95 % interval over models, or with fewer than four their range. It grows with the number of rows: compare "
        "stages on the same texts only.",
        "Lines of the nuclear norm against the layer, one for each stage.",
        panels,
        "nuclear norm",
        values=values,
        notes=["Models have different depths: at each layer the mean is over those that have it."]
        if depths > 1
        else [],
    )


def estimates_line(name: str, meaning: Meaning, each: Sequence[Estimate | None]) -> Series:
    """A line of estimates with their intervals; NaN where there is none."""
    ends: dict[str, list[float]] = {
        part: [math.nan if found is None or getattr(found, part) is None else getattr(found, part) for found in each]
        for part in ("mean", "low", "high")
    }
    return Series(name, meaning, [[value] for value in ends["mean"]], low=ends["low"], high=ends["high"])


def shown_methods(frame: pd.DataFrame, column: str, most: int = len(SHOWN)) -> list[str]:
    """The maps that figures show: an invertible network, linear, a free network, and whatever trained map is closest.

    Args:
        frame: errors.
        column: the error by which a map is close.
        most: so many of the first three at most.
    """
    maps = frame[frame["role"] == "method"]
    there = list(dict.fromkeys(maps["method"]))
    found = [next(name for name in names if name in there) for names in SHOWN if set(names) & set(there)][:most]
    sound = maps[trained(maps).groupby(maps["method"]).transform("all")]
    closest = sound.groupby("method", sort=False)[column].mean().nsmallest(1).index
    return list(dict.fromkeys([*(found or there[:1]), *closest]))


def _left_out(errors: pd.DataFrame, values: list[Row]) -> str:
    """Say which maps a figure does not show."""
    shown = {str(row["method"]).rstrip(MARK) for row in values}
    left = [name for name in dict.fromkeys(errors.loc[errors["role"] == "method", "method"]) if name not in shown]
    return f" The closest map is among them; not shown: {', '.join(left)}." if left else ""


def _boxes(line: pd.DataFrame, column: str, title: str) -> BoxPanel:
    """A panel of one map: a box for each stage at each layer."""
    sites = list(dict.fromkeys(zip(line["site_x"].astype(int), line["site_y"].astype(int), strict=True)))
    series = []
    for (stage,), own in by(line, "stage"):
        each = [pair_means(own[(own["site_x"] == x) & (own["site_y"] == y)], column).dropna() for x, y in sites]
        points = [[f"{a} and {b}" for a, b in means.index] for means in each]
        name = stage_words(stage) or "all pairs"
        series.append(Series(name, ("stage", str(stage)), [means.tolist() for means in each], points))
    return BoxPanel(title, [site_name(site) for site in sites], series)


def _box_values(line: pd.DataFrame, column: str, place: Row) -> list[Row]:
    found = []
    for (stage, _, _), own in by(line, "stage", "site_x", "site_y"):
        estimate = over_models(own, column)
        if estimate is not None:
            layer = site_name((int(own["site_x"].iloc[0]), int(own["site_y"].iloc[0])))
            found.append({**place, "stage": stage, "layer": layer, **estimate._asdict()})
    return found


def _trend(values: list[Row], column: str) -> str:
    """Say of the first map that is trained how its error goes from the first layer to the last, stage by stage."""
    values = [row for row in values if row["compared"]]
    if not values:
        return ""
    first = {key: values[0][key] for key in ("task", "rows", "method")}
    said = []
    for stage in dict.fromkeys(row["stage"] for row in values):
        line = [row for row in values if row["stage"] == stage and all(row[key] == first[key] for key in first)]
        if line:
            first_one, last_one = (f"{row['mean']:.3g} at layer {row['layer']}" for row in (line[0], line[-1]))
            said.append(f"{stage_words(stage)} {first_one} to {last_one}".strip())
    on = f" on {first['task']}" if first["task"] else ""
    rows = f", {kind_words(first['rows'])}" if first["rows"] else ""
    return f"The {WORDS[column]} of {first['method']}{on}{rows}, mean over pairs: {'; '.join(said)}."


def _cells(line: pd.DataFrame) -> list[tuple[int, int, float]]:
    means = line.groupby(["site_x", "site_y"])["fvu"].mean()
    return [(int(x), int(y), float(value)) for (x, y), value in means.items()]


def _layer_map(line: pd.DataFrame, title: str) -> HeatPanel:
    rows, columns = (sorted(line[f"site_{side}"].astype(int).unique()) for side in "xy")
    grid = np.full((len(rows), len(columns)), np.nan)
    for x, y, value in _cells(line):
        grid[rows.index(x), columns.index(y)] = value
    return HeatPanel(title, grid, [str(layer) for layer in rows], [str(layer) for layer in columns],
                     up="layer of X", across="layer of Y")  # fmt: skip
