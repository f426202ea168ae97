"""All layers of all models, a block for each pair of models."""

from collections.abc import Iterator, Sequence

import pandas as pd
from pandas import DataFrame

from aligners.reports.report import Row
from aligners.reports.study import described_tables, row_selection
from aligners.reports.study.contents import Figure, HeatPanel
from aligners.reports.study.frames import (
    STAGES,
    Frames,
    Groups,
    Names,
    Part,
    by,
    in_order,
    place_words,
    stage_words,
)

TUNING = ("pretrained", "finetuned")
END = ["model", "stage", "layer"]
X, Y = ([f"{name}_{side}" for name in END] for side in "xy")
A, B = ([f"{name}_{side}" for name in END] for side in "ab")


def block_map(
    frames: Frames, name: str, measures: Names, stages: Names = STAGES
) -> Figure:
    """Compare every layer of every model with every other, in a panel for each measure.

    Args:
        frames: frames of the study.
        name: name of the figure.
        measures: which to show, as far as they were measured.
        stages: of the models; those of one stage have panels of their own where stages were not compared. By default
            untrained models that were compared with trained ones are left out.

    Raises:
        Missing: none of the measures is there, or no two models were compared.
    """
    frame = of_stages(frames, measures, stages)
    if stages == STAGES and _are_crossed(frame):
        frame = of_stages(frames, measures, TUNING)
    groups = frames.groups
    panels, values = [], list[Row]()
    for place, part in _of_panels(frame):
        title = place_words(place["measure"], place["task"], _only_stage(part))
        panels.append(block_panel(part, title, groups))
        for row in block_values(part):
            values.append({**place, **row})
    return described_tables.figure(
        name,
        panels,
        values,
        alike=_families(values, groups),
        models=row_selection.models_in(frame),
        families=", ".join(dict.fromkeys(groups.values())),
        measured=", ".join(frame["measure"].unique()),
    )


def _of_panels(frame: DataFrame) -> Iterator[Part]:
    """Yield the rows of each task and measure; separately for each stage if no stages were compared."""
    for place, group in by(frame, "task", "measure"):
        if _are_crossed(group):
            yield place, group
            continue
        for _, part in by(group, "stage_x"):
            yield place, part


def _are_crossed(frame: DataFrame) -> bool:
    """Tell whether models of different stages were compared."""
    return len(row_selection.of_one_stage(frame)) < len(frame)


def _only_stage(frame: DataFrame) -> str | None:
    """Return the stage of all models, if there is only one."""
    stages = {*frame["stage_x"].dropna(), *frame["stage_y"].dropna()}
    if len(stages) > 1:
        return None
    return next(iter(stages), None)


def of_stages(frames: Frames, measures: Names, stages: Names) -> DataFrame:
    """Return similarities of models that are both of these stages, or of none; by measure, in the given order."""
    frame = row_selection.similarities(frames, measures)
    ends = frame[["stage_x", "stage_y"]]
    chosen = ends.isin(stages) | ends.isna()
    frame = frame[chosen.all(axis=1)]
    names = " or ".join(map(stage_words, stages))
    row_selection.present(frame, f"the study has no similarity of {names} models")
    order = frame["measure"].map(list(measures).index)
    return frame.loc[order.sort_values(kind="stable").index]


def _families(values: Sequence[Row], groups: Groups) -> list[Row]:
    """State the mean of each measure within and between families, if there are both."""
    frame = DataFrame(values)
    a = frame["model_a"].map(groups.get)
    b = frame["model_b"].map(groups.get)
    known = a.notna() & b.notna()
    other = frame["model_a"] != frame["model_b"]
    same_stage = frame["stage_a"] == frame["stage_b"]
    pairs = frame.assign(alike=a == b)[known & other & same_stage]
    alike = []
    for place, part in by(pairs, "measure"):
        mean = part.groupby("alike")["value"].mean().dropna()
        if len(mean) == 2:
            alike.append({**place, "within": mean[True], "between": mean[False]})
    return alike


def entries_of(frame: DataFrame) -> DataFrame:
    """Return the similarity of each layer a to each layer b, whichever of them was X.

    Args:
        frame: rows of one measure; those of direction `both` count both ways.

    Returns:
        Columns model_a, stage_a, layer_a, model_b, stage_b, layer_b and value; each pair of layers once.
    """
    columns = [*A, *B, "value"]
    there = frame.loc[frame["direction"] != "backward", [*X, *Y, "value"]]
    back = frame.loc[frame["direction"] != "forward", [*Y, *X, "value"]]
    ways = [there.set_axis(columns, axis=1), back.set_axis(columns, axis=1)]
    entries = pd.concat(ways, ignore_index=True)
    stages = ["stage_a", "stage_b"]
    entries[stages] = entries[stages].fillna("")
    pairs = entries.groupby([*A, *B], sort=False, as_index=False)
    return pairs["value"].mean()


def block_panel(frame: DataFrame, title: str, groups: Groups) -> HeatPanel:
    """Draw up the map of all models.

    Args:
        frame: rows of one measure.
        title: title of the panel.
        groups: model -> its family; models of one family stand side by side.
    """
    entries = entries_of(frame)
    layers = _layers_of(entries)
    stages = {stage for _, stage in layers}
    blocks, every, numbers = [], [], []
    for model, stage in _side_by_side(list(layers), groups):
        name = model
        if len(stages) > 1:
            name = f"{model}, {stage_words(stage)}"
        blocks.append((name, len(layers[model, stage])))
        for layer in layers[model, stage]:
            every.append((model, stage, layer))
            numbers.append(f"{name} {int(layer)}")
    values = entries.set_index([*A, *B])["value"].unstack(B)
    values = values.reindex(index=every, columns=every)
    return HeatPanel(
        title,
        values.to_numpy(dtype=float),
        rows=numbers,
        columns=numbers,
        blocks=blocks,
        up="",
        across="",
    )


def _layers_of(entries: DataFrame) -> dict[tuple[str, str], list[int]]:
    """(model, stage) -> its layers, in order of appearance."""
    a = entries[A].set_axis(END, axis=1)
    b = entries[B].set_axis(END, axis=1)
    ends = pd.concat([a, b])
    layers = {}
    for (model, stage), rows in ends.groupby(["model", "stage"], sort=False):
        layers[str(model), str(stage)] = sorted(rows["layer"].unique())
    return layers


def _side_by_side(
    models: Sequence[tuple[str, str]], groups: Groups
) -> list[tuple[str, str]]:
    """(model, stage) by stage, and within a stage by family."""
    stages = in_order([stage for _, stage in models])
    families = [None, *groups.values()]

    def order(end: tuple[str, str]) -> tuple[int, int]:
        model, stage = end
        return stages.index(stage), families.index(groups.get(model))

    return sorted(models, key=order)


def block_values(frame: DataFrame) -> list[Row]:
    """Return the mean of every block, of each model with each; a layer's similarity with itself is left out."""
    entries = entries_of(frame)
    same = entries[A].to_numpy() == entries[B].to_numpy()
    different = entries[~same.all(axis=1)]
    keys = ["model_a", "stage_a", "model_b", "stage_b"]
    means = different.groupby(keys, sort=False, as_index=False)["value"].mean()
    return means.to_dict("records")
