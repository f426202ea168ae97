"""Means over pairs of models, with intervals over models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd
import torch

from aligners.injection.scoring.pair_intervals import OVER_MODELS, interval_over_models

__all__ = ["RANGE_OF_PAIRS", "WHAT_INTERVALS_ARE", "Estimate", "over_models", "pair_means"]

RANGE_OF_PAIRS = "range of the pairs"
WHAT_INTERVALS_ARE = (
    "± is the standard deviation over pairs; brackets are the 95 % interval over models: a jackknife that leaves out "
    "one model at a time with all of its pairs, as pairs share models. With fewer than four models they are the range "
    "of the pairs instead, in braces."
)


class Estimate(NamedTuple):
    """A mean over pairs of models.

    Attributes:
        mean: over pairs.
        sd: standard deviation over pairs; None for one pair.
        low: lower end of the interval over models; None for one pair.
        high: its upper end.
        interval: what its ends are.
        pairs: number of pairs.
        models: number of models among them.
        lost: number of pairs without a value, as after an overflow; they are left out.
    """

    mean: float
    sd: float | None = None
    low: float | None = None
    high: float | None = None
    interval: str = OVER_MODELS
    pairs: int = 1
    models: int = 1
    lost: int = 0

    @property
    def over_models(self) -> bool:
        """Whether the interval is one over models, and not a mere range."""
        return self.interval == OVER_MODELS


def over_models(
    frame: pd.DataFrame, column: str, groups: Mapping[str, str] | None = None, *, ordered: bool = False
) -> Estimate | None:
    """Average a column over pairs of models.

    Args:
        frame: rows with model_x, model_y and the column; several rows of a pair, as of its layers, are averaged first.
        column: what to average.
        groups: model -> group, where the pairs are between two groups: each group then has an error of its own.
        ordered: whether a pair and its reverse are two; by default they are averaged as one.

    Returns:
        None if no row has a value.
    """
    means = pair_means(frame, column, ordered=ordered)
    known = means.dropna()
    if known.empty:
        return None
    pairs, values = list(known.index), torch.tensor(known.to_numpy(dtype=float, copy=True))
    models = {model for pair in pairs for model in pair}
    kinds = {model: groups[model] if groups else "" for model in models}
    ends = interval_over_models(values[None], pairs, kinds)
    low, high = (float(values.min()), float(values.max())) if ends is None else (float(end) for end in ends)
    several = len(pairs) > 1
    return Estimate(
        mean=float(values.mean()),
        sd=float(values.std()) if several else None,
        low=low if several else None,
        high=high if several else None,
        interval=RANGE_OF_PAIRS if ends is None else OVER_MODELS,
        pairs=len(pairs),
        models=len(models),
        lost=len(means) - len(known),
    )


def pair_means(frame: pd.DataFrame, column: str, *, ordered: bool = False) -> pd.Series:
    """Return the mean of a column for each pair of models (a, b); NaN for a pair that lacks a value in some row."""
    pairs = list(zip(frame["model_x"], frame["model_y"], strict=True))
    if not ordered:
        pairs = [(min(pair), max(pair)) for pair in pairs]
    values = pd.Series(pd.to_numeric(frame[column]).to_numpy(dtype=float), index=pd.Index(pairs, tupleize_cols=False))
    by_pair = values.groupby(level=0, sort=False)
    return by_pair.mean().mask(values.isna().groupby(level=0, sort=False).any())
