"""Similarity of every layer of every model to every other: a block for each pair of models."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from aligners.reports.report import Row
from aligners.reports.study.contents import HeatPanel
from aligners.reports.study.frames import in_order, stage_words

__all__ = ["MOST_MODELS", "block_panel", "block_values", "entries_of"]

MOST_MODELS = 16  # with a block each; of more, blocks are means over pairs of the models of a family
A, B = ["model_a", "stage_a", "layer_a"], ["model_b", "stage_b", "layer_b"]
ALL = "all models"


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
        own = frame.loc[frame["direction"] != skipped, [*a, *b, "value"]]
        parts.append(own.set_axis([*A, *B, "value"], axis=1))
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
        entries = _families(entries, groups)
        groups = {}
    parts = _in_order(entries, groups)
    means = entries.groupby([*A, *B])["value"].mean().unstack(B)
    layers = [(*part, layer) for part in parts for layer in sorted(_layers(entries, part))]
    grid = means.reindex(index=layers, columns=layers).to_numpy(dtype=float)
    staged = len({stage for _, stage in parts}) > 1
    names = {part: part[0] + (f", {stage_words(part[1])}" if staged else "") for part in parts}
    sizes = [(name, sum(layer[:2] == part for layer in layers)) for part, name in names.items()]
    numbers = [f"{names[layer[:2]]} {int(layer[2])}" for layer in layers]
    return HeatPanel(title, grid, numbers, numbers, sizes, sizes)


def block_values(frame: pd.DataFrame) -> list[Row]:
    """The mean of every block: of each model with each, a layer with itself left out."""
    entries = entries_of(frame)
    same = (entries[A].to_numpy() == entries[B].to_numpy()).all(1)
    keys = ["model_a", "stage_a", "model_b", "stage_b"]
    return entries[~same].groupby(keys, sort=False, as_index=False)["value"].mean().to_dict("records")


def _families(entries: pd.DataFrame, groups: Mapping[str, str]) -> pd.DataFrame:
    """Pairs of different models, each named after its family."""
    apart = entries[entries["model_a"] != entries["model_b"]]
    named = {name: apart[name].map(lambda model: groups.get(model, ALL)) for name in ("model_a", "model_b")}
    return apart.assign(**named)


def _in_order(entries: pd.DataFrame, groups: Mapping[str, str]) -> list[tuple[str, str]]:
    """The models at their stages: by stage, then by family, then in the order of the study."""
    found = list(dict.fromkeys([
        *entries[["model_a", "stage_a"]].itertuples(index=False, name=None),
        *entries[["model_b", "stage_b"]].itertuples(index=False, name=None),
    ]))  # fmt: skip
    stages, families = in_order([stage for _, stage in found]), list(dict.fromkeys(groups.values()))
    place = {name: number for number, name in enumerate(families)}
    return sorted(found, key=lambda part: (stages.index(part[1]), place.get(groups.get(part[0], ""), -1)))


def _layers(entries: pd.DataFrame, part: tuple[str, str]) -> set[int]:
    ends = ((entries[["model_" + end, "stage_" + end]] == list(part)).all(axis=1) for end in "ab")
    here = dict(zip("ab", ends, strict=True))
    return {layer for end, rows in here.items() for layer in entries.loc[rows, f"layer_{end}"].unique()}
