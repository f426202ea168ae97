"""Brown et al. 2023: CKA, stitching and angular distance between groups of models."""

from __future__ import annotations

import pandas as pd
import torch

from aligners.injection.scoring.pair_intervals import over_pairs
from aligners.reports.names import site_name
from aligners.reports.report import Row
from aligners.reports.study.frames import (
    BoxPanel,
    Cell,
    Figure,
    Frames,
    LinePanel,
    Missing,
    Series,
    Table,
    by,
    place_words,
    stage_words,
)
from aligners.reports.study.papers import shared
from aligners.reports.study.statistics import Difference, Estimate, group_test, over_models, pair_means
from aligners.similarity.functional.summaries import angular_distance

CKAS = ("minibatch_cka", "cka")  # the paper's, or what there is
ALL = "all pairs"
LEVEL = 0.05  # of p, from which on groups are not told apart


def cka_by_layer(frames: Frames, name: str) -> Figure:
    """Figure 2 right: CKA at each layer, within and between groups of models."""
    frame, measure = _cka(frames, CKAS)
    panels, values = [], list[Row]()
    for (task, stage), own in by(frame, "task", "stage"):
        layers, series = sorted(int(layer) for layer in own["layer_x"].unique()), []
        for (pair,), line in by(own, "groups"):
            kinds = _kinds(line, frames.groups)
            each = [over_models(line[line["layer_x"] == layer], "value", kinds) for layer in layers]
            series.append(shared.series_of(str(pair), ("group", str(pair)), each))
            place = {"task": task, "stage": stage, "groups": pair}
            means = dict(zip(layers, each, strict=True))
            values += [{**place, "layer": layer, **mean._asdict()} for layer, mean in means.items() if mean]
        panels.append(LinePanel(place_words(task, stage), [str(layer) for layer in layers], series))
    return shared.figure(name, panels, values, measure=measure)


def stitching_by_layer(frames: Frames, name: str) -> Figure:
    """Figure 2 left: what stitching costs at each site, within and between groups of models."""
    frame = frames.of("stitching", "penalty")
    frame = frame[frame["site_x"].notna() & (frame["site_x"] == frame["site_y"])]
    panels, values = [], list[Row]()
    for (task, stage, method), own in by(frame, "task", "stage", "method"):
        kinds = _kinds(own, frames.groups)
        members: dict[str, list[str]] | None = None
        if kinds is not None:
            members = {group: [model for model in kinds if kinds[model] == group] for group in kinds.values()}
        means = over_pairs(own.to_dict("records"), members)
        sites = sorted({(int(row["site_x"]), int(row["site_y"])) for row in means})
        series = []
        for group in dict.fromkeys(row["group"] for row in means):
            rows = [row for row in means if row["group"] == group]
            ends = [Estimate(row["penalty"], None, row["penalty_low"], row["penalty_high"]) for row in rows]
            at = {(int(row["site_x"]), int(row["site_y"])): end for row, end in zip(rows, ends, strict=True)}
            meaning = ("group", group.replace("-to-", " and "))
            series.append(shared.series_of(group.replace("-to-", " → "), meaning, [at.get(site) for site in sites]))
        panels.append(LinePanel(place_words(task, stage, method), [site_name(site) for site in sites], series))
        values += [{"task": task, "stage": stage, **row} for row in means]
    return shared.figure(name, panels, values, untrained=shared.untrained_said(frame))


def angles(frames: Frames, name: str) -> Figure:
    """Figure 8: angular distances between whole models, a box for each pair of groups."""
    distances = _distances(frames)
    panels = [_angle_boxes(own, place_words(*place)) for place, own in by(distances, "task", "stage")]
    return shared.figure(name, panels, distances.to_dict("records"), _angles(frames)[1])


def _angle_boxes(own: pd.DataFrame, title: str) -> BoxPanel:
    names = list(dict.fromkeys(own["groups"]))
    series = []
    for place, name in enumerate(names):
        line = own[own["groups"] == name]
        points = [f"{a} and {b}" for a, b in zip(line["model_x"], line["model_y"], strict=True)]
        own_place = [at == place for at in range(len(names))]
        distances = [line["distance"].tolist() if here else [] for here in own_place]
        series.append(Series(name, ("group", name), distances, [points if here else [] for here in own_place]))
    return BoxPanel(title, names, series)


def angles_table(frames: Frames, name: str) -> Table:
    """Angular distances within and between groups, and whether the groups differ (Figure 8 and eq. 2)."""
    return shared.table(name, *_angles(frames))


def _angles(frames: Frames) -> tuple[list[dict[str, Cell]], list[str]]:
    """Rows of the table of angular distances, and what they say."""
    rows: list[dict[str, Cell]] = []
    said: list[str] = []
    for (task, stage), own in by(_distances(frames), "task", "stage"):
        test = group_test(pair_means(own, "distance"), frames.groups) if own["grouped"].all() else None
        tested = {"difference": test.difference, "p": test.p, "least": test.least} if test else {}
        said += [_apart(test, place_words(task, stage))] if test else []
        for (pair,), line in by(own, "groups"):
            place: dict[str, Cell] = {"task": task, "stage": stage_words(stage), "groups": pair}
            rows.append({**place, **shared.estimates(line, ["distance"], _kinds(line, frames.groups)), **tested})
    return rows, said


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
    frame = shared.similarities(frames, measures)
    measure = next(name for name in measures if name in set(frame["measure"]))
    frame = frame[(frame["measure"] == measure) & (frame["layer_x"] == frame["layer_y"])]
    frame = shared.between_models(shared.of_one_stage(frame))
    ends = zip(frame["group_x"], frame["group_y"], strict=True)
    pairs = [ALL if pd.isna(x) or pd.isna(y) else " and ".join(sorted((str(x), str(y)))) for x, y in ends]
    return frame.assign(groups=pairs), measure


def _distances(frames: Frames) -> pd.DataFrame:
    """Angular distance of each pair of models of one depth, from linear CKA."""
    frame, _ = _cka(frames, CKAS[::-1])
    ends = [frame[[f"model_{side}", f"layer_{side}"]].set_axis(["model", "layer"], axis=1) for side in "xy"]
    depths = pd.concat(ends).groupby("model")["layer"].nunique()
    rows: list[Row] = []
    for (task, stage, x, y), own in by(frame, "task", "stage", "model_x", "model_y"):
        if depths[x] == depths[y] == own["layer_x"].nunique():
            values = own.groupby("layer_x")["value"].mean().to_numpy()
            distance = float(angular_distance(torch.diag(torch.tensor(values, dtype=torch.float64))))
            pair = own["groups"].iloc[0]
            rows.append({"task": task, "stage": stage, "model_x": x, "model_y": y, "groups": pair,
                         "grouped": pair != ALL, "distance": distance})  # fmt: skip
    if not rows:
        raise Missing("no two models of one depth were compared")
    return pd.DataFrame(rows)


def _kinds(line: pd.DataFrame, groups: dict[str, str]) -> dict[str, str] | None:
    """Model -> group, in the order of the rows; None unless every model has one."""
    models = list(dict.fromkeys([*line["model_x"], *line["model_y"]]))
    return {model: groups[model] for model in models} if set(models) <= set(groups) else None
