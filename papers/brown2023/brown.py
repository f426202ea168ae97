"""Brown et al. 2023: CKA, stitching and angular distance between groups of models."""

import pandas as pd
import torch
from pandas import DataFrame

from aligners.injection.scoring.pair_intervals import over_pairs
from aligners.reports.report import Row
from aligners.reports.study import described_tables, row_selection
from aligners.reports.study.contents import (
    Figure,
    Meaning,
    Table,
    box_panel,
    line_panels,
)
from aligners.reports.study.frames import (
    Frames,
    Groups,
    Missing,
    Names,
    by,
    place_words,
)
from aligners.reports.study.registry import register
from aligners.reports.study.statistics import (
    bases_of,
    group_test,
    over_models,
    pair_means,
)
from aligners.similarity.functional.cka import angular_distance

CKAS = ("minibatch_cka", "cka")  # the paper's, or what there is
# the paper's as printed, which stands beside it where a study has it
PRINTED = "mean_minibatch_cka"
ALL = "all pairs"
PLACE = ("task", "stage", "definition")
NATIVE = "native"
SIZES = ["layers", "width", "heads", "head_width", "rotary_width"]

# ---------------------------------------------------------------------- CKA and angular distance


def cka_by_layer(frames: Frames, name: str) -> Figure:
    """Figure 2 right: CKA at each layer, within and between groups of models."""
    frame, measure = _cka(frames, CKAS)
    values = list[Row]()
    for place, part in by(frame, *PLACE, "groups", "layer"):
        mean = over_models(part, "value", _kinds(part, frames.groups))
        if mean:
            values.append({**place, **mean._asdict()})
    panels = line_panels(values, PLACE, "groups", "layer", _look)
    return described_tables.figure(name, panels, values, measure=measure)


def _cka(frames: Frames, measures: Names) -> tuple[DataFrame, str]:
    """Matching layers of different models of one depth, by the first measure there is, and as printed.

    With the columns `layer`, `groups` and `definition`, the measure, which is missing where it is the only one.
    """
    there = set(row_selection.similarities(frames, measures)["measure"])
    measure = next(name for name in measures if name in there)
    frame = row_selection.similarities(frames, (measure, PRINTED))
    frame = frame[frame["layer_x"] == frame["layer_y"]]
    definition = None
    if frame["measure"].nunique() > 1:
        definition = frame["measure"]
    frame = frame.assign(definition=definition, layer=frame["layer_x"])
    frame = row_selection.between_models(row_selection.of_one_stage(frame))
    pairs = []
    for groups in zip(frame["group_x"], frame["group_y"], strict=True):
        if any(map(pd.isna, groups)):
            pairs.append(ALL)
        else:
            pairs.append(" and ".join(sorted(groups)))
    return frame.assign(groups=pairs), measure


def _look(groups: str) -> tuple[str, Meaning]:
    """Name and meaning of a pair of groups, or of the routes from one group into another."""
    name = groups.replace("-to-", " → ")
    pair = groups.replace("-to-", " and ")
    return name, ("group", pair)


def _kinds(line: DataFrame, groups: Groups) -> dict[str, str] | None:
    """Model -> group, in the order of the rows; None unless every model has one."""
    kinds = {}
    for model in [*line["model_x"], *line["model_y"]]:
        if model not in groups:
            return None
        kinds[model] = groups[model]
    return kinds


def angles(frames: Frames, name: str) -> Figure:
    """Figure 8: angular distances between whole models, a box for each pair of groups."""
    distances = _distances(frames)
    panels = []
    for place, part in by(distances, *PLACE):
        title = place_words(*place.values())
        groups = part["groups"].unique().tolist()
        boxes = part.assign(value=part["distance"])
        panels.append(box_panel(title, boxes, "groups", "groups", groups, _look))
    _, tests = _angles(frames)
    return described_tables.figure(
        name, panels, distances.to_dict("records"), tests=tests
    )


def angles_table(frames: Frames, name: str) -> Table:
    """Angular distances within and between groups, and whether the groups differ (Figure 8 and eq. 2)."""
    rows, tests = _angles(frames)
    return described_tables.table(name, rows, tests=tests)


def _angles(frames: Frames) -> tuple[list[Row], list[Row]]:
    """Rows of the table of angular distances, and the tests of each task and stage."""
    rows, tests = list[Row](), list[Row]()
    for place, part in by(_distances(frames), *PLACE):
        tested: Row = {}
        test = None
        if ALL not in set(part["groups"]):
            means = pair_means(part, "distance")
            test = group_test(means, frames.groups, bases_of(part))
        if test:
            tests.append(place | test._asdict())
            tested["difference"] = test.difference
            tested["p"] = test.p
            tested["least"] = test.least
        for pair, line in by(part, "groups"):
            kinds = _kinds(line, frames.groups)
            row = place | pair
            row |= row_selection.estimates(line, ["distance"], kinds)
            rows.append(row | tested)
    return rows, tests


def _distances(frames: Frames) -> DataFrame:
    """Angular distance of each pair of models of one depth, from linear CKA."""
    frame, _ = _cka(frames, CKAS[::-1])
    depths = dict[str, int]()
    for side in "xy":
        for model, layers in frame.groupby(f"model_{side}")["layer"]:
            known = depths.get(model, 0)
            depths[model] = max(layers.nunique(), known)
    rows = []
    for place, part in by(frame, *PLACE, "model_x", "model_y"):
        depth = part["layer"].nunique()
        depth_x = depths[place["model_x"]]
        depth_y = depths[place["model_y"]]
        if not depth_x == depth_y == depth:
            continue
        row = dict(place)
        row["groups"] = part["groups"].iloc[0]
        row["distance"] = _distance(part)
        row |= part.filter(["base_x", "base_y"]).iloc[0]
        rows.append(row)
    row_selection.present(rows, "no two models of one depth were compared")
    return DataFrame(rows)


def _distance(part: DataFrame) -> float:
    """The angular distance of two models, from their CKA at each layer; above 1 counts as 1."""
    means = part.groupby("layer")["value"].mean()
    values = torch.tensor(means.to_numpy(dtype=float), dtype=torch.float64)
    alike = torch.diag(values.clamp(max=1))
    return float(angular_distance(alike))


# ---------------------------------------------------------------------- stitching


def stitching_by_layer(frames: Frames, name: str, column: str) -> Figure:
    """Figure 2 left: what stitching costs at each site, within and between groups of models.

    Args:
        frames: frames of the study.
        name: name of the figure.
        column: `penalty` in nats, `accuracy_penalty`, or `accuracy` of the stitched model.
    """
    frame = frames.of("stitching", column)
    same = frame["site_x"] == frame["site_y"]
    frame = frame[frame["site_x"].notna() & same]
    row_selection.present(frame, "nothing was stitched from a site to the same site")
    values = _penalties(frame, frames.groups, column)
    drawn = []
    for row in values:
        point = dict(row)
        point["mean"] = row[column]
        point["low"] = row[f"{column}_low"]
        point["high"] = row[f"{column}_high"]
        point["site"] = int(row["site_x"])
        drawn.append(point)
    panels = line_panels(drawn, ["task", "stage", "method"], "group", "site", _look)
    untrained = row_selection.untrained_said(frame)
    return described_tables.figure(
        name, panels, values, column=column, untrained=untrained
    )


def _penalties(frame: DataFrame, groups: Groups, column: str) -> list[Row]:
    """Means over pairs of models of what stitching costs, with intervals, by task, stage and method."""
    quantities = dict.fromkeys(("penalty", "score_penalty", column))
    values = []
    for place, part in by(frame, "task", "stage", "method"):
        means = over_pairs(
            part.to_dict("records"),
            _members(part, groups) or None,
            quantities=list(quantities),
            bases=bases_of(part),
        )
        about = {"task": place["task"], "stage": place["stage"]}
        for row in means:
            values.append(about | row)
    return values


def _members(part: DataFrame, groups: Groups) -> dict[str, list[str]]:
    """Group -> its models; empty unless every model has a group."""
    kinds = _kinds(part, groups) or {}
    members: dict[str, list[str]] = {}
    for model, group in kinds.items():
        members.setdefault(group, []).append(model)
    return members


def accuracies(frames: Frames, name: str) -> Table:
    """Accuracy of the models themselves on the texts of each task, such as the parts of HANS, by group."""
    frame = frames.of("stitching", "accuracy")
    alone = frame[frame["method"] == NATIVE]
    alone = alone.drop_duplicates(["task", "stage", "model_y"])
    base = alone.get("base_y")
    alone = alone.assign(model_x=alone["model_y"], base_x=base)
    rows = []
    for place, part in by(alone, "task", "stage", "group_y"):
        means = row_selection.estimates(part, ["accuracy"])
        rows.append(place | means)
    return described_tables.table(name, rows)


# ---------------------------------------------------------------------- sizes


def sizes(frames: Frames, name: str) -> Table:
    """Table 1: width of the attention heads, and how much of it turns with the position.

    Raises:
        Missing: all models are of one size.
    """
    frame = frames.of("similarity_models", "head_width")
    frame = frame.drop_duplicates("model")
    if len(frame.drop_duplicates(SIZES)) == 1:
        raise Missing("all models are of one size")
    by_model = frame.set_index("model")[SIZES]
    rows = []
    for model, own in by_model.iterrows():
        row: Row = {"model": model}
        for column, size in own.dropna().items():
            row[str(column)] = int(size)
        for column in ("head_width", "rotary_width"):
            printed = described_tables.paper_value(name, column, model=str(model))
            row[f"paper_{column}"] = printed
        rows.append(row)
    return described_tables.table(name, rows)


register(__name__)
