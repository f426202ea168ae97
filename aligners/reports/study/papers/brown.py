"""The tables and figures of Brown et al. 2023: CKA, stitching and angular distance between groups of models."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import torch

from aligners.injection.scoring.pair_intervals import over_pairs
from aligners.reports.names import site_name
from aligners.reports.report import Row
from aligners.reports.study.contents import BoxPanel, Cell, Column, Figure, LinePanel, Missing, Series, Table
from aligners.reports.study.differences import Difference, group_test
from aligners.reports.study.estimates import WHAT_INTERVALS_ARE, over_models, pair_means
from aligners.reports.study.frames import Frames, by, place_words, stage_words
from aligners.reports.study.papers.choosing import COUNTS, PLACE, between_models, counts, known, untrained_said
from aligners.reports.study.papers.ren_figures import estimates_line
from aligners.similarity.functional.summaries import angular_distance

__all__ = ["angles", "angles_table", "cka_by_layer", "stitching_by_layer"]

CKAS = ("minibatch_cka", "cka")  # the paper's, or what there is
ALL = "all pairs"
LEVEL = 0.05  # of p, from which on groups are not told apart
CKA_LINES = (
    "of the same layer of two models, mean over the pairs within and between groups with the 95 % interval over "
    "models; with fewer than four models in a group, the range of the pairs."
)
STITCHING = (
    "Penalty of stitching at each site (loss minus the target's own, in nats), mean over the routes from the first "
    "group into the second, with the 95 % interval over models or, with fewer than four models in a group, the range "
    "of the routes. On test texts that no layer was trained on."
)
GROUP_TESTS = (
    "one for each task and stage, by dealing the models out to groups of the same sizes anew: in all ways, or "
    "in 9,999 drawn with a seed where there are more than 10,000."
)


def cka_by_layer(frames: Frames) -> Figure:
    """Brown et al., Figure 2 right: CKA at each layer, within and between groups of models."""
    frame, measure = _cka(frames, CKAS)
    panels, values = [], []
    for (task, stage), own in by(frame, "task", "stage"):
        layers = sorted(own["layer_x"].unique())
        series = []
        for (pair,), line in by(own, "groups"):
            kinds = _kinds(line, frames.groups)
            each = [over_models(line[line["layer_x"] == layer], "value", kinds) for layer in layers]
            series.append(estimates_line(str(pair), ("group", str(pair)), each))
            place = {"task": task, "stage": stage, "groups": pair}
            values += [{**place, "layer": int(layer), **found._asdict()}
                       for layer, found in zip(layers, each, strict=True) if found is not None]  # fmt: skip
        panels.append(LinePanel(place_words(task, stage), [str(int(layer)) for layer in layers], series))
    return Figure(
        "brown_figure_2_cka",
        "CKA between groups of models (Brown et al., Figure 2 right)",
        f"{measure} {CKA_LINES}",
        "Lines of CKA against the layer, one for each pair of groups.",
        panels,
        measure,
        values=values,
    )


def stitching_by_layer(frames: Frames) -> Figure:
    """Brown et al., Figure 2 left: what stitching costs at each site, within and between groups of models."""
    frame = frames.of("stitching", "penalty")
    frame = frame[frame["site_x"].notna() & (frame["site_x"] == frame["site_y"])]
    panels, values = [], []
    for (task, stage, method), own in by(frame, "task", "stage", "method"):
        means = over_pairs(own.to_dict("records"), _members(own, frames.groups))
        sites = sorted({(int(row["site_x"]), int(row["site_y"])) for row in means})
        names = dict.fromkeys(row["group"] for row in means)
        series = [_penalty_line(name, [row for row in means if row["group"] == name], sites) for name in names]
        panels.append(LinePanel(place_words(task, stage, method), [site_name(site) for site in sites], series))
        values += [{"task": task, "stage": stage, **row} for row in means]
    return Figure(
        "brown_figure_2_stitching",
        "Stitching between groups of models (Brown et al., Figure 2 left)",
        STITCHING,
        "Lines of the stitching penalty against the site, one for each pair of groups.",
        panels,
        "penalty, nats",
        across="site",
        values=values,
        notes=untrained_said(frame),
    )


def _members(own: pd.DataFrame, groups: dict[str, str]) -> dict[str, list[str]] | None:
    """Group -> its models; None unless every model has one."""
    models = list(dict.fromkeys([*own["model_x"], *own["model_y"]]))
    if not set(models) <= set(groups):
        return None
    return {
        name: [model for model in models if groups[model] == name]
        for name in dict.fromkeys(groups[model] for model in models)
    }


def angles(frames: Frames) -> Figure:
    """Brown et al., Figure 8: angular distances between whole models, a box for each pair of groups."""
    distances = _distances(frames)
    return Figure(
        "brown_figure_8",
        "Angular distance between models (Brown et al., Figure 8)",
        "√Σ arccos(CKA)² over the layers of two models of one depth (eq. 2), a box over the pairs within and between "
        "groups: higher is less alike.",
        "Box plots of the angular distance, one for each pair of groups.",
        [_angle_boxes(own, place_words(*place)) for place, own in by(distances, "task", "stage")],
        "angular distance, radians",
        across="",
        values=distances.to_dict("records"),
        findings=angles_table(frames).findings,
    )


def _angle_boxes(own: pd.DataFrame, title: str) -> BoxPanel:
    names = list(dict.fromkeys(own["groups"]))
    series = []
    for place, name in enumerate(names):
        line = own[own["groups"] == name]
        values: list[list[float]] = [[] for _ in names]
        points: list[list[str]] = [[] for _ in names]
        values[place] = line["distance"].tolist()
        points[place] = [f"{a} and {b}" for a, b in zip(line["model_x"], line["model_y"], strict=True)]
        series.append(Series(name, ("group", name), values, points))
    return BoxPanel(title, names, series)


def angles_table(frames: Frames) -> Table:
    """Angular distances within and between groups, and whether the groups differ."""
    rows: list[dict[str, Cell]] = []
    said: list[str] = []
    for (task, stage), own in by(_distances(frames), "task", "stage"):
        test = group_test(pair_means(own, "distance"), frames.groups) if own["grouped"].all() else None
        tested = {"difference": test.difference, "p": test.p, "least": test.least} if test else {}
        said += [_apart(test, place_words(task, stage))] if test else []
        for (pair,), line in by(own, "groups"):
            found = over_models(line, "distance", _kinds(line, frames.groups))
            place: dict[str, Cell] = {"task": task, "stage": stage_words(stage), "groups": pair}
            rows.append({**place, "distance": found, **counts(found), **tested})
    heading = {"difference": ("between − within", "+z.3f"), "p": ("p", ".3g"), "least": ("least p", ".3g")}
    columns = [Column("groups", "groups"), Column("distance", "angular distance", ".3f"), *COUNTS]
    return Table(
        "brown_angular_distance",
        "Angular distance between models (Brown et al., Figure 8 and eq. 2)",
        f"Mean over pairs, from CKA of the layers of two models of one depth. {WHAT_INTERVALS_ARE}"
        + (f" p: {len(said)} test{'s' if len(said) > 1 else ''}, {GROUP_TESTS}" if said else ""),
        known([*PLACE, *columns, *(Column(key, *words) for key, words in heading.items())], rows),
        rows,
        notes=["Held out: CKA is on test texts, and nothing is fitted."],
        findings=said,
    )


def _apart(test: Difference, where: str) -> str:
    further = "further apart" if test.difference >= 0 else "closer together"
    found = f"{abs(test.difference):.3f} radians {further} than models of one group"
    if test.p >= LEVEL:
        found = f"not told apart from models of one group: {test.difference:+z.3f} radians"
    return (
        f"{where + ': ' if where else ''}models of different groups are {found} (p = {test.p:.3g} by permutation of "
        f"{test.models} models, of which no p is below {test.least:.3g})."
    )


def _cka(frames: Frames, measures: tuple[str, ...]) -> tuple[pd.DataFrame, str]:
    """Matching layers of different models of one depth, with the column `groups`, by the first measure there is."""
    frame = frames.of("similarity", "value")
    measure = next((name for name in measures if name in set(frame["measure"])), None)
    if measure is None:
        raise Missing(f"none of {', '.join(measures)} was measured")
    frame = frame[(frame["measure"] == measure) & (frame["features"] == "raw") & (frame["layer_x"] == frame["layer_y"])]
    frame = between_models(frame[frame["stage_x"].fillna("") == frame["stage_y"].fillna("")])
    return frame.assign(groups=_group_pairs(frame)), measure


def _group_pairs(frame: pd.DataFrame) -> list[str]:
    """`a and b` of the groups of each row's models, in one order; "all pairs" where a model has none."""
    pairs = zip(frame["group_x"], frame["group_y"], strict=True)
    return [ALL if pd.isna(x) or pd.isna(y) else " and ".join(sorted((str(x), str(y)))) for x, y in pairs]


def _distances(frames: Frames) -> pd.DataFrame:
    """Angular distance of each pair of models of one depth, from linear CKA."""
    frame, _ = _cka(frames, ("cka", "minibatch_cka"))
    depths: Mapping[str, int] = pd.concat(
        [frame[[f"model_{s}", f"layer_{s}"]].set_axis(["model", "layer"], axis=1) for s in "xy"]
    ).groupby("model")["layer"].nunique().to_dict()  # fmt: skip
    rows: list[Row] = []
    for (task, stage, x, y), own in by(frame, "task", "stage", "model_x", "model_y"):
        if depths[str(x)] == depths[str(y)] == own["layer_x"].nunique():
            values = own.groupby("layer_x")["value"].mean().to_numpy()
            distance = float(angular_distance(torch.diag(torch.tensor(values, dtype=torch.float64))))
            pair = own["groups"].iloc[0]
            rows.append({"task": task, "stage": stage, "model_x": x, "model_y": y, "groups": pair,
                         "grouped": pair != ALL, "distance": distance})  # fmt: skip
    if not rows:
        raise Missing("no two models of one depth were compared")
    return pd.DataFrame(rows)


def _kinds(line: pd.DataFrame, groups: dict[str, str]) -> dict[str, str] | None:
    """Model -> group for an interval between two groups; None if the models have none."""
    models = {*line["model_x"], *line["model_y"]}
    return {model: groups[model] for model in models} if models <= set(groups) else None


def _penalty_line(name: str, rows: list[Row], sites: list[tuple[int, int]]) -> Series:
    at = {(int(row["site_x"]), int(row["site_y"])): row for row in rows}

    def along(column: str) -> list[float]:
        cells = [at.get(site, {}).get(column) for site in sites]
        return [float("nan") if cell is None else float(cell) for cell in cells]

    shown, meaning = name.replace("-to-", " → "), ("group", name.replace("-to-", " and "))
    values = [[value] for value in along("penalty")]
    return Series(shown, meaning, values, low=along("penalty_low"), high=along("penalty_high"))
