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
        known = not any(map(pd.isna, groups))
        pairs.append(" and ".join(sorted(groups)) if known else ALL)
    return frame.assign(groups=pairs), measure


def _look(groups: str) -> tuple[str, Meaning]:
    """Name and meaning of a pair of groups, or of the routes from one group into another."""
    return groups.replace("-to-", " → "), ("group", groups.replace("-to-", " and "))


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
            test = group_test(
                pair_means(part, "distance"), frames.groups, bases_of(part)
            )
        if test:
            tests.append({**place, **test._asdict()})
            tested = {"difference": test.difference, "p": test.p, "least": test.least}
        for pair, line in by(part, "groups"):
            kinds = _kinds(line, frames.groups)
            means = row_selection.estimates(line, ["distance"], kinds)
            rows.append({**place, **pair, **means, **tested})
    return rows, tests


def _distances(frames: Frames) -> DataFrame:
    """Angular distance of each pair of models of one depth, from linear CKA."""
    frame, _ = _cka(frames, CKAS[::-1])
    depths = dict[str, int]()
    for side in "xy":
        for model, layers in frame.groupby(f"model_{side}")["layer"]:
            depths[model] = max(layers.nunique(), depths.get(model, 0))
    rows = []
    for place, part in by(frame, *PLACE, "model_x", "model_y"):
        depth = part["layer"].nunique()
        if not depths[place["model_x"]] == depths[place["model_y"]] == depth:
            continue
        row = {**place, "groups": part["groups"].iloc[0], "distance": _distance(part)}
        rows.append({**row, **part.filter(["base_x", "base_y"]).iloc[0]})
    return DataFrame(
        row_selection.present(rows, "no two models of one depth were compared")
    )


def _distance(part: DataFrame) -> float:
    """The angular distance of two models, from their CKA at each layer; above 1 counts as 1."""
    means = part.groupby("layer")["value"].mean().to_numpy(dtype=float)
    values = torch.tensor(means, dtype=torch.float64).clamp(max=1)
    return float(angular_distance(torch.diag(values)))


# ---------------------------------------------------------------------- stitching


def stitching_by_layer(frames: Frames, name: str, column: str) -> Figure:
    """Figure 2 left: what stitching costs at each site, within and between groups of models.

    Args:
        frames: of the study.
        name: of the figure.
        column: `penalty` in nats, `accuracy_penalty`, or `accuracy` of the stitched model.
    """
    frame = frames.of("stitching", column)
    same = frame["site_x"].notna() & (frame["site_x"] == frame["site_y"])
    frame = row_selection.present(
        frame[same], "nothing was stitched from a site to the same site"
    )
    quantities = list(dict.fromkeys(("penalty", "score_penalty", column)))
    values = list[Row]()
    for place, part in by(frame, "task", "stage", "method"):
        means = over_pairs(
            part.to_dict("records"),
            _members(part, frames.groups) or None,
            quantities=quantities,
            bases=bases_of(part),
        )
        for row in means:
            values.append({"task": place["task"], "stage": place["stage"], **row})
    drawn = []
    for row in values:
        ends = {
            "mean": row[column],
            "low": row[f"{column}_low"],
            "high": row[f"{column}_high"],
        }
        drawn.append({**row, **ends, "site": int(row["site_x"])})
    panels = line_panels(drawn, ["task", "stage", "method"], "group", "site", _look)
    untrained = row_selection.untrained_said(frame)
    return described_tables.figure(
        name, panels, values, column=column, untrained=untrained
    )


def _members(part: DataFrame, groups: Groups) -> dict[str, list[str]]:
    """Group -> its models; empty unless every model has a group."""
    members: dict[str, list[str]] = {}
    for model, group in (_kinds(part, groups) or {}).items():
        members.setdefault(group, []).append(model)
    return members


def accuracies(frames: Frames, name: str) -> Table:
    """Accuracy of the models themselves on the texts of each task, such as the parts of HANS, by group."""
    frame = frames.of("stitching", "accuracy")
    alone = frame[frame["method"] == NATIVE].drop_duplicates(
        ["task", "stage", "model_y"]
    )
    alone = alone.assign(model_x=alone["model_y"], base_x=alone.get("base_y"))
    rows = []
    for place, part in by(alone, "task", "stage", "group_y"):
        rows.append({**place, **row_selection.estimates(part, ["accuracy"])})
    return described_tables.table(name, rows)


# ---------------------------------------------------------------------- sizes


def sizes(frames: Frames, name: str) -> Table:
    """Table 1: width of the attention heads, and how much of it turns with the position.

    Raises:
        Missing: all models are of one size.
    """
    frame = frames.of("similarity_models", "head_width").drop_duplicates("model")
    if len(frame.drop_duplicates(SIZES)) == 1:
        raise Missing("all models are of one size")
    rows = []
    for model, own in frame.set_index("model")[SIZES].iterrows():
        row: Row = {"model": model}
        for column, size in own.dropna().items():
            row[str(column)] = int(size)
        for column in ("head_width", "rotary_width"):
            printed = described_tables.paper_value(name, column, model=str(model))
            row[f"paper_{column}"] = printed
        rows.append(row)
    return described_tables.table(name, rows)


register(__name__)
