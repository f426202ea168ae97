"""All layers of all models, a block for each pair of models."""

from collections.abc import Mapping, Sequence

import pandas as pd

from aligners.reports.report import Row
from aligners.reports.study import described_tables, row_selection
from aligners.reports.study.contents import Figure, HeatPanel
from aligners.reports.study.frames import STAGES, Frames, by, in_order, place_words, stage_words

TUNING = ("pretrained", "finetuned")
MOST_MODELS = (
    16  # with a block each; of more, blocks are means over pairs of the models of a family
)
ALL = "all models"
A, B = ["model_a", "stage_a", "layer_a"], ["model_b", "stage_b", "layer_b"]


def block_map(
    frames: Frames, name: str, measures: Sequence[str], stages: Sequence[str] = STAGES
) -> Figure:
    """Every layer of every model against every other, a panel for each measure.

    Args:
        frames: of the study.
        name: of the figure.
        measures: which to show, as far as they were measured.
        stages: of the models; those of one stage have panels of their own where stages were not compared. By default
            untrained models that were compared with trained ones are left out.

    Raises:
        Missing: none of the measures is there, or no two models were compared.
    """
    frame = of_stages(frames, measures, stages)
    if stages == STAGES and _are_crossed(frame):
        frame = of_stages(
            frames, measures, TUNING
        )  # untrained ones beside trained ones are asked for by name
    panels, values = [], list[Row]()
    for place, group in by(frame, "task", "measure"):
        parts = [group] if _are_crossed(group) else [part for _, part in by(group, "stage_x")]
        for part in parts:
            stages_of = {*part["stage_x"].dropna(), *part["stage_y"].dropna()}
            stage = stages_of.pop() if len(stages_of) == 1 else None
            title = place_words(place["measure"], place["task"], stage)
            panels.append(block_panel(part, title, frames.groups))
            values += [{**place, **row} for row in block_values(part)]
    about: Row = {"models": row_selection.models_in(frame), "most_models": MOST_MODELS}
    about["families"] = ", ".join(dict.fromkeys(frames.groups.values()))
    about["measured"] = ", ".join(dict.fromkeys(frame["measure"]))
    return described_tables.figure(
        name, panels, values, alike=_families(values, frames.groups), **about
    )


def _are_crossed(frame: pd.DataFrame) -> bool:
    """Whether models of different stages were compared."""
    return len(row_selection.of_one_stage(frame)) < len(frame)


def of_stages(frames: Frames, measures: Sequence[str], stages: Sequence[str]) -> pd.DataFrame:
    """Similarities of models that are both of some stages, or of none; by measure, in the order that is asked for."""
    frame = row_selection.similarities(frames, measures)
    ends = frame[["stage_x", "stage_y"]]
    chosen = ends.isin(stages) | ends.isna()
    frame = frame[chosen.all(axis=1)]
    row_selection.present(
        frame, f"the study has no similarity of {' or '.join(map(stage_words, stages))} models"
    )
    order = list(measures).index
    return frame.sort_values("measure", key=lambda names: names.map(order), kind="stable")


def _families(values: Sequence[Row], groups: dict[str, str]) -> list[Row]:
    """The mean of each measure within and between families, where there are both."""
    frame = pd.DataFrame(values)
    a, b = frame["model_a"].map(groups), frame["model_b"].map(groups)
    other = (frame["model_a"] != frame["model_b"]) & (frame["stage_a"] == frame["stage_b"])
    pairs = frame.assign(alike=a == b)[other & a.notna() & b.notna()]
    alike = []
    for place, part in by(pairs, "measure"):
        mean = part.groupby("alike")["value"].mean().dropna()
        if len(mean) == 2:
            alike.append({**place, "within": mean[True], "between": mean[False]})
    return alike


def entries_of(frame: pd.DataFrame) -> pd.DataFrame:
    """The similarity of each layer a to each layer b, whichever of them was X.

    Args:
        frame: rows of one measure; those of direction `both` count both ways.

    Returns:
        Columns model_a, stage_a, layer_a, model_b, stage_b, layer_b and value; each pair of layers once.
    """
    sides = [[f"{name}_{side}" for name in ("model", "stage", "layer")] for side in "xy"]
    parts = []
    for skipped, (a, b) in (("backward", sides), ("forward", sides[::-1])):
        rows = frame.loc[frame["direction"] != skipped, [*a, *b, "value"]]
        parts.append(rows.set_axis([*A, *B, "value"], axis=1))
    entries = pd.concat(parts, ignore_index=True)
    entries[["stage_a", "stage_b"]] = entries[["stage_a", "stage_b"]].fillna("")
    return entries.groupby([*A, *B], sort=False, as_index=False)["value"].mean()


def block_panel(frame: pd.DataFrame, title: str, groups: Mapping[str, str]) -> HeatPanel:
    """Draw up the map of all models; of many models, that of their families.

    Args:
        frame: rows of one measure.
        title: of the panel.
        groups: model -> its family; models of one family stand side by side.
    """
    entries = entries_of(frame)
    if entries["model_a"].nunique() > MOST_MODELS:
        entries = entries[entries["model_a"] != entries["model_b"]]
        families = {
            name: entries[name].map(lambda model: groups.get(model, ALL))
            for name in ("model_a", "model_b")
        }
        entries, groups = entries.assign(**families), {}
    ends = pd.concat(
        [entries[side].set_axis(["model", "stage", "layer"], axis=1) for side in (A, B)]
    )
    layers = {(str(model), str(stage)): sorted(rows["layer"].unique())
              for (model, stage), rows in ends.groupby(["model", "stage"], sort=False)}  # fmt: skip
    stages = in_order([stage for _, stage in layers])
    place = {family: number for number, family in enumerate(dict.fromkeys(groups.values()))}
    parts = sorted(
        layers, key=lambda part: (stages.index(part[1]), place.get(groups.get(part[0], ""), -1))
    )
    staged = len(stages) > 1
    names = {part: part[0] + (f", {stage_words(part[1])}" if staged else "") for part in parts}
    sizes = [(names[part], len(layers[part])) for part in parts]
    every = [(*part, layer) for part in parts for layer in layers[part]]
    grid = entries.groupby([*A, *B])["value"].mean().unstack(B).reindex(index=every, columns=every)
    numbers = [f"{names[model, stage]} {int(layer)}" for model, stage, layer in every]
    return HeatPanel(title, grid.to_numpy(dtype=float), numbers, numbers, sizes, up="", across="")


def block_values(frame: pd.DataFrame) -> list[Row]:
    """The mean of every block: of each model with each, a layer with itself left out."""
    entries = entries_of(frame)
    same = (entries[A].to_numpy() == entries[B].to_numpy()).all(1)
    keys = ["model_a", "stage_a", "model_b", "stage_b"]
    return (
        entries[~same].groupby(keys, sort=False, as_index=False)["value"].mean().to_dict("records")
    )
