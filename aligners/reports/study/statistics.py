"""Means over pairs of models with intervals over models, and tests of differences by permutation of models."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain, combinations, product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from pandas import DataFrame

from aligners.injection.scoring.pair_intervals import (
    OVER_MODELS,
    Kinds,
    independent_units,
    interval_over_models,
)

RANGE_OF_PAIRS = "range of the pairs"
COPY = r"#\d+$"  # ends the name of a further fine-tuning of a model
MOST_EXACT = 10_000  # arrangements of the models up to which all are counted
DRAWS, SEED = 9_999, 0  # of arrangements, where there are more
Numbers = NDArray[np.float64]


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


def over_models(
    frame: DataFrame, column: str, groups: Mapping[str, str] | None = None
) -> Estimate | None:
    """Average a column over pairs of models.

    Args:
        frame: rows with model_x, model_y, the column, and what `bases_of` reads; several rows of a pair, as of its
            layers, are averaged first.
        column: what to average.
        groups: model -> group, where the pairs are between two groups: each group then has an error of its own.

    Returns:
        None if no row has a value.
    """
    means = pair_means(frame, column)
    known = means.dropna()
    if known.empty:
        return None
    pairs = list(known.index)
    values = torch.tensor(known.to_numpy(copy=True))
    kinds = dict.fromkeys(_models_of(known), "")
    if groups:
        kinds = {model: groups[model] for model in kinds}
    low, high, interval = values.min(), values.max(), RANGE_OF_PAIRS
    ends = interval_over_models(values[None], pairs, kinds, bases_of(frame))
    if ends:
        low, high, interval = ends
    estimate = Estimate(
        float(values.mean()),
        interval=interval,
        pairs=len(pairs),
        models=len(kinds),
        lost=len(means) - len(pairs),
    )
    if len(pairs) == 1:
        return estimate
    return estimate._replace(sd=float(values.std()), low=float(low), high=float(high))


def pair_means(frame: DataFrame, column: str) -> pd.Series:
    """Return the mean of a column for each pair of models; NaN for a pair that lacks a value in some row.

    A pair and its reverse are one.
    """
    pairs = []
    for x, y in zip(frame["model_x"], frame["model_y"], strict=True):
        pairs.append((min(x, y), max(x, y)))
    numbers = pd.to_numeric(frame[column]).to_numpy(dtype=float)
    values = pd.Series(numbers, index=pd.Index(pairs, tupleize_cols=False))
    return values.groupby(level=0, sort=False).mean(skipna=False)


def bases_of(frame: DataFrame) -> dict[str, str]:
    """Return model -> its pretrained model: as the study says (`models.bases`), or the name before #2."""
    bases: dict[str, str] = {}
    for side in "xy":
        models = frame.drop_duplicates(f"model_{side}")
        names = models[f"model_{side}"]
        known = names.str.replace(COPY, "", regex=True)
        if f"base_{side}" in models:
            known = models[f"base_{side}"].fillna(known)
        bases |= dict(zip(names, known, strict=True))
    return bases


# ---------------------------------------------------------------------- tests


class Difference(NamedTuple):
    """A difference, and how often chance would make one as large.

    Attributes:
        difference: what was tested against 0.
        p: two-sided: share of the arrangements whose difference is as far from 0.
        least: the smallest p that so few models allow.
        models: number of models, or of pretrained models with their copies.
    """

    difference: float
    p: float
    least: float
    models: int


def sign_test(differences: pd.Series, bases: Kinds | None = None) -> Difference | None:
    """Test whether the mean of a difference over pairs of models is 0, by changing the signs of models.

    Each model's share in the mean is its pseudo-value M · mean − (M − 1) · mean without its pairs (Tukey 1958): the
    mean of these is that over pairs, and the models' are nearly independent where those of pairs are not. Where there
    is no difference, each is as likely to be above 0 as below.

    Args:
        differences: one for each pair, indexed by (model, model), as `pair_means` returns.
        bases: model -> the pretrained model that it is a copy of: these are then what changes sign, with all copies.

    Returns:
        None with fewer than three of them.

    References:
        Tukey 1958, "Bias and confidence in not quite large samples". The rate of false alarms under effects of models
        is measured in `tests/aligners/reports/study/test_statistics.py`.
    """
    known = differences.dropna()
    if known.empty:
        return None
    models = _models_of(known)
    (units,), _ = independent_units(models, dict.fromkeys(models, ""), bases)
    without = np.array([known.index.map(unit.isdisjoint) for unit in units], dtype=bool)
    count = len(units)
    if count < 3 or not without.any(axis=1).all():
        return None
    values = known.to_numpy(dtype=float)
    mean = float(values.mean())
    means_without = without @ values / without.sum(axis=1)
    shares = count * mean - (count - 1) * means_without
    exact = 2**count <= MOST_EXACT
    if exact:
        signs = np.array(list(product((1, -1), repeat=count)))
    else:
        signs = np.random.default_rng(SEED).choice((1, -1), size=(DRAWS, count))
    p = _share_as_far(signs @ shares / count, float(shares.mean()), exact)
    return Difference(mean, p, 2 / 2**count, count)


def _models_of(pairs: pd.Series) -> dict[str, None]:
    """Return the models of pairs, each once, in order of appearance."""
    return dict.fromkeys(chain.from_iterable(pairs.index))


def group_test(
    values: pd.Series, groups: Mapping[str, str], bases: Kinds | None = None
) -> Difference | None:
    """Test whether pairs between two groups of models differ from pairs within, by reassigning the models to groups.

    Args:
        values: one for each pair of models, indexed by (model, model).
        groups: model -> group; two groups.
        bases: model -> the pretrained model that it is a copy of: copies are dealt together, unless all are of one.

    Returns:
        The mean between groups minus that within; None unless there are two groups with pairs within and between, or
        where copies of one of several pretrained models are in both.
    """
    known = values.dropna()
    units, _ = independent_units(_models_of(known), groups, bases)
    if len(units) != 2:
        return None
    place = {}
    for number, unit in enumerate([*units[0], *units[1]]):
        for model in unit:
            place[model] = number
    size, count = len(units[0]), len(units[0]) + len(units[1])
    ends = np.array(list(map(place.get, chain.from_iterable(known.index)))).reshape(
        -1, 2
    )
    numbers = known.to_numpy(dtype=float)
    first = np.arange(count) < size
    difference = float(_between_less_within(first[None], ends, numbers)[0])
    if math.isnan(difference):
        return None
    ways, exact = _deals(count, size)
    p = _share_as_far(_between_less_within(ways, ends, numbers), difference, exact)
    return Difference(difference, p, 1 / len(ways), count)


def _deals(count: int, size: int) -> tuple[NDArray[np.bool_], bool]:
    """Return all ways to choose the first group, (ways, models), or as many draws as allowed; and which of these."""
    exact = math.comb(count, size) <= MOST_EXACT
    chosen: list[Any]
    if exact:
        chosen = list(combinations(range(count), size))
    else:
        draw = np.random.default_rng(SEED)
        chosen = [draw.choice(count, size, replace=False) for _ in range(DRAWS)]
    ways = np.zeros((len(chosen), count), dtype=bool)
    np.put_along_axis(ways, np.array(chosen), True, axis=1)
    return ways, exact


def _between_less_within(
    first: NDArray[np.bool_], ends: NDArray[np.int64], values: Numbers
) -> Numbers:
    """Return the mean of pairs between the groups minus that of the others, for each assignment (ways, models)."""
    between = first[:, ends[:, 0]] != first[:, ends[:, 1]]
    within = ~between
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_between = between @ values / between.sum(axis=1)
        mean_within = within @ values / within.sum(axis=1)
    return mean_between - mean_within


def _share_as_far(arranged: Numbers, found: float, exact: bool) -> float:
    """Return the share of arrangements with a difference at least as far from 0; of draws, the data count as one."""
    far = int((np.abs(arranged) >= abs(found) * (1 - 1e-9)).sum())
    if exact:
        return far / len(arranged)
    return (far + 1) / (len(arranged) + 1)


def holm(ps: Sequence[float]) -> list[float]:
    """Adjust the p of several tests so that one false alarm among all of them has the stated chance (Holm 1979)."""
    order = np.argsort(ps)
    left = len(ps) - np.arange(len(ps))
    sorted_ps = np.minimum(1.0, left * np.array(ps)[order])
    adjusted = np.empty(len(ps))
    adjusted[order] = np.maximum.accumulate(sorted_ps)
    return adjusted.tolist()
