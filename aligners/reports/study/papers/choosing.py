"""What the tables and figures of all papers share: which rows they are made of, and columns that say of how many."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from aligners.fitting.outcomes import MARK, is_trained
from aligners.reports.study.contents import Cell, Column, Meaning, Missing, Series
from aligners.reports.study.estimates import Estimate
from aligners.reports.study.frames import LEAST_SITE
from aligners.similarity.controls import matching_layers

__all__ = [
    "COUNTS",
    "HELD_OUT",
    "PLACE",
    "between_models",
    "blocks",
    "counts",
    "is_last",
    "known",
    "map_cells",
    "matching",
    "scores_line",
    "trained",
    "untrained_said",
]

PLACE = [Column("task", "task"), Column("stage", "stage")]
COUNTS = [Column("pairs", "pairs", "d"), Column("models", "models", "d")]
HELD_OUT = {
    True: "Held out: yes, on test texts that no map was fitted on.",
    False: "Held out: no. These are the validation texts that chose each map's best step; `inject` measures on others.",
}


def between_models(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of two different models.

    Raises:
        Missing: there are none.
    """
    found = frame[frame["model_x"] != frame["model_y"]]
    if found.empty:
        raise Missing("the study has no pair of different models")
    return found


def blocks(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of one and the same site of both models: blocks, or whatever there is; rows without a site stay."""
    sited = frame["site_x"].notna()
    same = frame["site_x"] == frame["site_y"]
    if not (sited & same).any():  # models of different depth
        return frame
    some = same & (frame["site_x"] >= LEAST_SITE)
    return frame[~sited | (some if some.any() else same)]


def matching(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of matching layers of each pair, without the embeddings where there are blocks."""
    kept = []
    for _, own in frame.groupby(["model_x", "model_y"], sort=False):
        layers = [sorted(layer for layer in own[f"layer_{side}"].unique() if layer >= LEAST_SITE) for side in "xy"]
        if all(layers):
            pairs = set(matching_layers(*layers))
            places = zip(own["layer_x"], own["layer_y"], strict=True)
            own = own[[place in pairs for place in places]]
        kept.append(own)
    return pd.concat(kept) if kept else frame


def is_last(own: pd.DataFrame) -> pd.Series:
    """The last site of every pair, or rows without a site."""
    last = own.groupby(["model_x", "model_y"])["site_y"].transform("max")
    return own["site_y"].isna() | (own["site_y"] == last)


def trained(frame: pd.DataFrame) -> pd.Series:
    """Whether the map of each row is trained; closed forms and floors are."""
    if "training" not in frame.columns:
        return pd.Series(True, index=frame.index)
    return frame["training"].map(lambda outcome: is_trained({"training": outcome})).astype(bool)


def map_cells(method: str | None, own: pd.DataFrame) -> dict[str, Cell]:
    """The cells of a map: its name, marked where it is not trained everywhere, and whether findings may compare it."""
    sound = bool(trained(own).all())
    return {"method": f"{method}{'' if sound else MARK}", "compared": sound}


def untrained_said(frame: pd.DataFrame) -> list[str]:
    """What the mark means, method by method; nothing if all maps are trained."""
    found = trained(frame).groupby(frame["method"], sort=False).agg(["sum", "size"])
    counted = [f"{name} {size - sound} of {size}" for name, sound, size in found.itertuples() if sound < size]
    said = f"{MARK}: maps that kept their untrained start or diverged, which no finding and no test counts: "
    return [f"{said}{', '.join(counted)}."] if counted else []


def counts(estimate: Estimate | None) -> dict[str, Cell]:
    """The numbers of pairs and models of an estimate, for a row."""
    return {"pairs": estimate.pairs, "models": estimate.models} if estimate else {"pairs": 0, "models": 0}


def known(columns: Sequence[Column], rows: Sequence[dict[str, Cell]]) -> list[Column]:
    """The columns with a value in some row."""
    return [column for column in columns if any(row.get(column.key) is not None for row in rows)]


def scores_line(name: str, meaning: Meaning, line: pd.DataFrame, sites: Sequence[int], scale: float = 1) -> Series:
    """The mean score of several models at each layer with their range, or that of one with its interval over texts."""
    several, by_site = line["model"].nunique() > 1, line.groupby("site")
    low, high = (
        by_site["score"].agg(how) if several else by_site[f"score_{end}"].mean()
        for how, end in (("min", "low"), ("max", "high"))
    )
    middle, low, high = (scale * values.reindex(sites) for values in (by_site["score"].mean(), low, high))
    return Series(name, meaning, [[value] for value in middle], low=low.tolist(), high=high.tolist())
