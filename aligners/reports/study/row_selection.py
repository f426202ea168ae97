"""Selects rows for tables and figures, and makes cells from them."""

from collections.abc import Iterable
from typing import Any, TypeVar

import pandas as pd
from pandas import DataFrame

from aligners.fitting.training_status import MARK, is_trained
from aligners.reports.report import Row
from aligners.reports.study.frames import LEAST_SITE, Frames, Groups, Missing, Names, by
from aligners.reports.study.statistics import COPY, over_models
from aligners.similarity.controls import matching_layers

Rows = TypeVar("Rows", DataFrame, list[Any])

# ---------------------------------------------------------------------- rows that are chosen


def present(rows: Rows, lacking: str) -> Rows:
    """Rows, or whatever a table or figure is made of, if there are any.

    Raises:
        Missing: there are none; with these words.
    """
    if not len(rows):
        raise Missing(lacking)
    return rows


def similarities(frames: Frames, measures: Names = ()) -> DataFrame:
    """Return similarities of raw features, by those of some measures that there are; by all if none is named.

    Raises:
        Missing: none of them was measured.
    """
    frame = frames.of("similarity", "value")
    frame = frame[frame["features"] == "raw"]
    if not measures:
        return frame
    frame = frame[frame["measure"].isin(measures)]
    return present(frame, f"none of {', '.join(measures)} was measured")


def of_one_base(frames: Frames, measures: Names) -> DataFrame:
    """Return similarities of two models of one base, before or after fine-tuning, with the column `base`."""
    frame = frames.of("similarity", "value", other_tasks=True)
    frame = frame[frame["measure"].isin(measures) & (frame["features"] == "raw")]
    stages = frame[["stage_x", "stage_y"]]
    frame = frame[stages.isin(("pretrained", "finetuned")).all(axis=1)]
    frame = frame.assign(base=without_copy(frame["model_x"]))
    return frame[frame["base"] == without_copy(frame["model_y"])]


def not_computed(frames: Frames) -> list[Row]:
    """Return measures that some pairs of models at one stage lack: the number of pairs, and the first reason."""
    try:
        frame = between_models(of_one_stage(frames.of("similarity_missing")))
    except Missing:
        return []
    missing = []
    for place, rows in by(
        frame[frame["figure"] == "value"], "task", "stage", "measure"
    ):
        why = rows["why"].iloc[0]
        about = {"not_computed": why, "pairs": len(rows), "models": models_in(rows)}
        missing.append({**place, **about})
    return missing


def of_one_stage(frame: DataFrame) -> DataFrame:
    """Return rows of two models at the same stage."""
    return frame[frame["stage_x"].fillna("") == frame["stage_y"].fillna("")]


def between_models(frame: DataFrame) -> DataFrame:
    """Return rows of two different models.

    Raises:
        Missing: there are none.
    """
    different = frame[frame["model_x"] != frame["model_y"]]
    return present(different, "the study has no pair of different models")


def models_in(frame: DataFrame) -> int:
    """Return the number of models among the rows."""
    return len({*frame["model_x"], *frame["model_y"]})


def blocks(frame: DataFrame) -> DataFrame:
    """Return rows with the same site of both models: blocks, or whatever there is; rows without a site stay."""
    sited = frame["site_x"].notna()
    same = frame["site_x"] == frame["site_y"]
    if not same.any():  # models of different depth
        return frame
    of_blocks = same & (frame["site_x"] >= LEAST_SITE)
    if of_blocks.any():
        same = of_blocks
    return frame[~sited | same]


def matching(frame: DataFrame) -> DataFrame:
    """Return rows of matching layers of each pair, without the embeddings where there are blocks."""
    matched = []
    for _, rows in frame.groupby(["model_x", "model_y"], sort=False):
        layers_x = _blocks_of(rows["layer_x"])
        layers_y = _blocks_of(rows["layer_y"])
        if layers_x and layers_y:
            pairs = pd.MultiIndex.from_tuples(matching_layers(layers_x, layers_y))
            rows = rows[
                pd.MultiIndex.from_frame(rows[["layer_x", "layer_y"]]).isin(pairs)
            ]
        matched.append(rows)
    return pd.concat(matched) if matched else frame


def _blocks_of(layers: pd.Series) -> list[int]:
    return sorted(layers[layers >= LEAST_SITE].unique())


def is_last(rows: DataFrame) -> pd.Series:
    """Return whether a row has the last site of its pair, or no site."""
    last = rows.groupby(["model_x", "model_y"])["site_y"].transform("max")
    return rows["site_y"].isna() | (rows["site_y"] == last)


def without_copy(models: pd.Series) -> pd.Series:
    """Return the models that these are fine-tunings of."""
    return models.str.replace(COPY, "", regex=True)


# ---------------------------------------------------------------------- whether maps are trained


def trained(frame: DataFrame) -> pd.Series:
    """Return whether the map of each row is trained; closed forms and floors count as trained."""
    sound = [is_trained({"training": outcome}) for outcome in frame["training"]]
    return pd.Series(sound, index=frame.index, dtype=bool)


def untrained_said(frame: DataFrame) -> str:
    """Return the meaning of the mark, method by method; empty if all maps are trained."""
    counted = []
    for method, sound in trained(frame).groupby(frame["method"], sort=False):
        if not sound.all():
            counted.append(f"{method} {(~sound).sum()} of {len(sound)}")
    if not counted:
        return ""
    return (
        f"{MARK}: maps that kept their untrained start or diverged, which findings and tests leave "
        f"out: {', '.join(counted)}."
    )


def about_maps(errors: DataFrame) -> dict[str, bool | str]:
    """Say whether errors are on held-out texts, and which maps are not trained."""
    held_out = "held_out" not in errors or bool(errors["held_out"].all())
    return {"held_out": held_out, "untrained": untrained_said(errors)}


# ---------------------------------------------------------------------- rows that are made


def map_cells(method: str | None, rows: DataFrame) -> Row:
    """Return a map's cells: its name, marked unless it is trained everywhere, and whether findings may compare it."""
    sound = bool(trained(rows).all())
    if sound:
        return {"method": method, "compared": True}
    return {"method": f"{method}{MARK}", "compared": False}


def estimates(
    rows: DataFrame, quantities: Iterable[str], groups: Groups | None = None
) -> Row:
    """Return the means of quantities over pairs of models, and the numbers of pairs and models for the first of them.

    Args:
        rows: rows of one line of a table.
        quantities: its columns, as far as the rows have them.
        groups: model -> group, of pairs between two groups.
    """
    means: Row = {}
    for name in quantities:
        if name in rows:
            means[name] = over_models(rows, name, groups)
    first = next(iter(means.values()), None)
    means["pairs"] = first.pairs if first else 0
    means["models"] = first.models if first else 0
    return means
