"""Brown et al. 2023: CKA, stitching and angular distance between groups of models."""

from collections.abc import Sequence

import pandas as pd
import torch

from aligners.injection.scoring.pair_intervals import over_pairs
from aligners.reports.report import Row
from aligners.reports.study import described_tables, row_selection
from aligners.reports.study.contents import Figure, Meaning, Table, box_panel, line_panels
from aligners.reports.study.frames import Frames, Missing, by, place_words
from aligners.reports.study.registry import register
from aligners.reports.study.statistics import bases_of, group_test, over_models, pair_means
from aligners.similarity.functional.summaries import angular_distance

CKAS = ("minibatch_cka", "cka")  # the paper's, or what there is
PRINTED = (
    "mean_minibatch_cka"  # the paper's as printed, which stands beside it where a study has it
)
ALL = "all pairs"
PLACE = ("task", "stage", "definition")
NATIVE = "native"


def cka_by_layer(frames: Frames, name: str) -> Figure:
    """Figure 2 right: CKA at each layer, within and between groups of models."""
    frame, measure = _cka(frames, CKAS)
    frame = frame.rename(columns={"layer_x": "layer"})
    values = list[Row]()
    for place, part in by(frame, *PLACE, "groups", "layer"):
        mean = over_models(part, "value", _kinds(part, frames.groups))
        if mean:
            values.append({**place, **mean._asdict()})
    panels = line_panels(values, PLACE, "groups", "layer", _look)
    return described_tables.figure(name, panels, values, measure=measure)


def stitching_by_layer(frames: Frames, name: str, column: str) -> Figure:
    """Figure 2 left: what stitching costs at each site, within and between groups of models.

    Args:
        frames: of the study.
        name: of the figure.
        column: `penalty` in nats, `accuracy_penalty`, or `accuracy` of the stitched model.
    """
    frame = frames.of("stitching", column)
    same = frame["site_x"].notna() & (frame["site_x"] == frame["site_y"])
    frame = row_selection.present(frame[same], "nothing was stitched from a site to the same site")
    quantities = list(dict.fromkeys(("penalty", "score_penalty", column)))
    values = list[Row]()
    for place, part in by(frame, "task", "stage", "method"):
        members: dict[str, list[str]] = {}
        for model, group in (_kinds(part, frames.groups) or {}).items():
            members.setdefault(group, []).append(model)
        rows, bases = part.to_dict("records"), bases_of(part)
        for row in over_pairs(rows, members or None, quantities=quantities, bases=bases):
            values.append({"task": place["task"], "stage": place["stage"], **row})
    names = {column: "mean", f"{column}_low": "low", f"{column}_high": "high"}
    drawn = pd.DataFrame(values).astype({"site_x": int}).rename(columns=names)
    panels = line_panels(
        drawn.to_dict("records"), ["task", "stage", "method"], "group", "site_x", _look
    )
    return described_tables.figure(
        name, panels, values, column=column, untrained=row_selection.untrained_said(frame)
    )


def accuracies(frames: Frames, name: str) -> Table:
    """Accuracy of the models themselves on the texts of each task, such as the parts of HANS, by group."""
    frame = frames.of("stitching", "accuracy")
    frame = frame[frame["method"] == NATIVE].drop_duplicates(["task", "stage", "model_y"])
    alone = frame.assign(model_x=frame["model_y"], base_x=frame.get("base_y"))
    rows = []
    for place, part in by(alone, "task", "stage", "group_y"):
        rows.append({**place, **row_selection.estimates(part, ["accuracy"])})
    return described_tables.table(name, rows)


def sizes(frames: Frames, name: str) -> Table:
    """Table 1: width of the attention heads, and how much of it turns with the position.

    Raises:
        Missing: all models are of one size.
    """
    columns = ["layers", "width", "heads", "head_width", "rotary_width"]
    frame = (
        frames.of("similarity_models", "head_width")
        .drop_duplicates("model")
        .set_index("model")[columns]
    )
    if len(frame.drop_duplicates()) == 1:
        raise Missing("all models are of one size")
    rows = []
    for model, own in frame.iterrows():
        row: Row = {"model": model}
        for column, size in own.dropna().items():
            row[str(column)] = int(size)
        for column in ("head_width", "rotary_width"):
            row[f"paper_{column}"] = described_tables.paper_value(name, column, model=str(model))
        rows.append(row)
    return described_tables.table(name, rows)


def _look(groups: str) -> tuple[str, Meaning]:
    """Name and meaning of a pair of groups, or of the routes from one group into another."""
    return groups.replace("-to-", " → "), ("group", groups.replace("-to-", " and "))


def angles(frames: Frames, name: str) -> Figure:
    """Figure 8: angular distances between whole models, a box for each pair of groups."""
    distances = _distances(frames)
    panels = []
    for place, part in by(distances.assign(value=distances["distance"]), *PLACE):
        groups = list(dict.fromkeys(part["groups"]))
        panels.append(
            box_panel(place_words(*place.values()), part, "groups", "groups", groups, _look)
        )
    return described_tables.figure(
        name, panels, distances.to_dict("records"), tests=_angles(frames)[1]
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
        if part["grouped"].all():
            test = group_test(pair_means(part, "distance"), frames.groups, bases_of(part))
            if test:
                tests.append({**place, **test._asdict()})
                tested = {"difference": test.difference, "p": test.p, "least": test.least}
        for pair, line in by(part, "groups"):
            means = row_selection.estimates(line, ["distance"], _kinds(line, frames.groups))
            rows.append({**place, **pair, **means, **tested})
    return rows, tests


def _cka(frames: Frames, measures: Sequence[str]) -> tuple[pd.DataFrame, str]:
    """Matching layers of different models of one depth, by the first measure there is, and as printed.

    With the columns `groups` and `definition`, the measure, which is missing where it is the only one.
    """
    there = set(row_selection.similarities(frames, measures)["measure"])
    measure = next(name for name in measures if name in there)
    frame = row_selection.similarities(frames, (measure, PRINTED))
    frame = frame[frame["layer_x"] == frame["layer_y"]]
    several = frame["measure"].nunique() > 1
    frame = frame.assign(definition=frame["measure"] if several else None)
    frame = row_selection.between_models(row_selection.of_one_stage(frame))
    pairs = []
    for x, y in zip(frame["group_x"], frame["group_y"], strict=True):
        known = not (pd.isna(x) or pd.isna(y))
        pairs.append(" and ".join(sorted((str(x), str(y)))) if known else ALL)
    return frame.assign(groups=pairs), measure


def _distances(frames: Frames) -> pd.DataFrame:
    """Angular distance of each pair of models of one depth, from linear CKA."""
    frame, _ = _cka(frames, CKAS[::-1])
    ends = [
        frame[[f"model_{side}", f"layer_{side}"]].set_axis(["model", "layer"], axis=1)
        for side in "xy"
    ]
    depths = pd.concat(ends).groupby("model")["layer"].nunique()
    rows = []
    for place, part in by(frame, *PLACE, "model_x", "model_y"):
        if depths[place["model_x"]] == depths[place["model_y"]] == part["layer_x"].nunique():
            values = torch.tensor(
                part.groupby("layer_x")["value"].mean().to_numpy(), dtype=torch.float64
            )
            pair, bases = part["groups"].iloc[0], part.filter(["base_x", "base_y"]).iloc[0]
            distance = float(angular_distance(torch.diag(values.clamp(max=1))))
            rows.append(
                {**place, "groups": pair, "grouped": pair != ALL, "distance": distance, **bases}
            )
    return pd.DataFrame(row_selection.present(rows, "no two models of one depth were compared"))


def _kinds(line: pd.DataFrame, groups: dict[str, str]) -> dict[str, str] | None:
    """Model -> group, in the order of the rows; None unless every model has one."""
    models = list(dict.fromkeys([*line["model_x"], *line["model_y"]]))
    return {model: groups[model] for model in models} if set(models) <= set(groups) else None


register(__name__)
