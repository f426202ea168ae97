"""Means over pairs of models, with intervals that account for models shared between pairs."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from aligners.errors import UserError, finite
from aligners.fitting.training_status import worst_of
from aligners.injection.scoring.scores import Row, named
from aligners.similarity.controls import jackknife_interval

LEAST_MODELS = 4
# What an interval covers.
OVER_MODELS = "95 % interval over models"
OVER_BASES = (
    "95 % interval over pretrained models"  # each is left out together with its copies
)
OVER_COPIES = "95 % interval over fine-tunings of one pretrained model"
RANGE = "range of the routes"
Kinds = Mapping[str, str]  # model -> its group, or what it was fine-tuned from


def over_pairs(
    rows: Sequence[Row],
    groups: Mapping[str, Sequence[str]] | None = None,
    quantities: Sequence[str] = ("penalty", "score_penalty"),
    by: Sequence[str] = ("method", "role", "site_x", "site_y"),
    bases: Kinds | None = None,
) -> list[Row]:
    """Average over the routes of each group, for every method and site pair (Brown et al. 2023, Figure 2).

    Routes share models, so they are not independent: the unit is the model. The interval is a jackknife: leave out
    one model at a time, with every route from it and into it, and take Student's t with one degree of freedom fewer
    than there are models. Between two groups, each has its own error with its own t, and the squares add (Banerjee
    1960). For normal effects of source, target and pair, the interval holds the truth in 95 to 99 % of samples of
    4 to 10 models. Where models differ, resampling them with replacement gives 77 to 88 %, and treating routes as
    independent 35 to 75 %. Copies of one pretrained model are not independent: see `independent_units`.

    The interval covers other models of the same kind on these texts; the interval of each row covers other texts. With
    fewer than four models in a group, the ends are the smallest and the largest of the routes, and `interval` says so.

    Args:
        rows: rows with model_x, model_y, `by` and `quantities`. Rows without a site are skipped.
        groups: name -> models; routes from group a into group b then form "a-to-b". By default all routes between
            different models are one group. Routes from a model into itself are always "same model".
        quantities: what to average.
        by: columns whose values are averaged separately.
        bases: model -> the pretrained model that it is a copy of; by default each model stands for itself.

    Returns:
        One row for each group and value of `by`: group, `by`, n_models, n_routes, interval, and each quantity with its
        _low and _high; None where a route lacks it, as after an overflow.

    Raises:
        ValueError: see `check_groups`.
    """
    sited = [row for row in rows if row["site_x"] is not None]
    models = list[str]()
    for row in sited:
        models += [row["model_x"], row["model_y"]]
    kinds = check_groups(groups, models)

    by_place: dict[tuple[Any, ...], list[Row]] = {}
    for row in sited:
        key = (_group_of(row, kinds), *map(row.get, by))
        by_place.setdefault(key, []).append(row)

    summaries = []
    for key, of_place in by_place.items():
        summary: Row = dict(zip(("group", *by), key, strict=True))
        summary |= _summary(of_place, kinds, quantities, bases)
        summaries.append(summary)
    return summaries


def _group_of(row: Row, kinds: Kinds) -> str:
    """Return the name of the group that a route belongs to."""
    x, y = row["model_x"], row["model_y"]
    if x == y:
        return "same model"
    if not kinds[x]:
        return "different models"
    return f"{kinds[x]}-to-{kinds[y]}"


def check_groups(
    groups: Mapping[str, Sequence[str]] | None, models: Iterable[str]
) -> dict[str, str]:
    """Return the group of each model; "" for all if there are no groups.

    Raises:
        ValueError: a model is in two groups or in none, or a group names a model that is not among `models`.
    """
    if groups is None:
        return dict.fromkeys(models, "")
    kinds: dict[str, str] = {}
    times = Counter[str]()
    for name, group in groups.items():
        times.update(group)
        kinds |= dict.fromkeys(group, name)

    twice = sorted((times - Counter(kinds.keys())).keys())
    present = set(models)
    absent = sorted(kinds.keys() - present)
    missing = sorted(present - kinds.keys())
    expected = "Expected every model of `groups` once and"
    if twice:
        raise UserError(f"{expected} in one group, but got {', '.join(twice)}.")
    if absent:
        raise UserError(
            f"{expected} among the models that were stitched, but got {', '.join(absent)}."
        )
    if missing:
        raise UserError(
            f"Expected every model in one of `groups`, but {', '.join(missing)} is in none. Name a group for it, or "
            "leave `groups` out."
        )
    return kinds


def _summary(
    rows: list[Row], kinds: Kinds, quantities: Sequence[str], bases: Kinds | None
) -> Row:
    """Return the columns of one group and place."""
    pairs = [(row["model_x"], row["model_y"]) for row in rows]
    table = pd.DataFrame(rows, columns=list(quantities), dtype=float)
    values = torch.tensor(table.to_numpy().T)
    low, high, interval = values.amin(-1), values.amax(-1), RANGE
    ends = interval_over_models(values, pairs, kinds, bases)
    if ends is not None:
        low, high, interval = ends

    summary: Row = {
        "n_models": len(set().union(*pairs)),
        "n_routes": len(set(pairs)),
        "interval": interval,
        "training": worst_of(rows).get("training"),
    }
    for name, *figures in zip(quantities, values.mean(-1), low, high, strict=True):
        summary |= named(name, map(finite, figures))
    return summary


def independent_units(
    models: Iterable[str], kinds: Kinds, bases: Kinds | None = None
) -> tuple[list[list[set[str]]], str]:
    """Put models into units that are independent of each other.

    Copies share their pretraining, so a unit is a pretrained model with all of its copies. Where all models are copies
    of one pretrained model, each is a unit, and the interval says nothing about other pretrainings. Where copies of one
    of several pretrained models are in different groups, the groups are not independent, and all units count as one
    group's.

    Args:
        models: models to put into units.
        kinds: model -> group.
        bases: model -> the pretrained model that it is a copy of; by default each model stands for itself.

    Returns:
        The units of each group, and what an interval over them is.
    """
    base_of = {model: (bases or {}).get(model, model) for model in models}
    count = len(set(base_of.values()))
    interval = _over_what(len(base_of), count)

    placed = {(base, kinds[model]) for model, base in base_of.items()}
    across_groups = count > 1 and len(placed) > count
    units: dict[str, dict[str, set[str]]] = {}
    for model, base in base_of.items():
        group, unit = kinds[model], base
        if across_groups:
            group = ""
        if count == 1:
            unit = model
        units.setdefault(group, {}).setdefault(unit, set()).add(model)
    return [list(of_group.values()) for of_group in units.values()], interval


def _over_what(models: int, bases: int) -> str:
    """Return what an interval over so many models, of so many pretrained ones, is."""
    if bases == models:
        return OVER_MODELS
    if bases == 1:
        return OVER_COPIES
    return OVER_BASES


def interval_over_models(
    values: Tensor,
    pairs: Sequence[tuple[str, str]],
    kinds: Kinds,
    bases: Kinds | None = None,
) -> tuple[Tensor, Tensor, str] | None:
    """Return the ends of the 95 % interval over models of means over pairs; see `over_pairs`.

    Args:
        values: (quantities, P), one for each pair.
        pairs: the models of each of the P pairs.
        kinds: model -> group; each group has its own error.
        bases: see `independent_units`; a pretrained model is left out with all of its copies.

    Returns:
        Lower and upper ends, each (quantities,), and a description of them. None if a group has fewer than four units,
        or a unit is part of every pair.
    """
    mean = values.mean(-1)
    squares = torch.zeros(len(values), dtype=torch.float64)
    groups, interval = independent_units(chain(*pairs), kinds, bases)
    for units in groups:
        kept = [list(map(unit.isdisjoint, pairs)) for unit in units]
        weights = torch.tensor(kept, dtype=torch.float64)
        counts = weights.sum(-1, keepdim=True)
        if len(units) < LEAST_MODELS or not bool(counts.all()):
            return None
        without_unit = (weights / counts) @ values.T
        low, high = jackknife_interval(mean, without_unit)
        squares = squares + ((high - low) / 2).square()
    half = squares.sqrt()
    return mean - half, mean + half, interval
