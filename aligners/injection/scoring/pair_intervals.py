"""Means over pairs of models, with intervals that allow for pairs sharing models."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aligners.errors import UserError, finite
from aligners.fitting.training_status import worst_of
from aligners.injection.scoring.scores import Row, named
from aligners.similarity.controls import jackknife_interval

LEAST_MODELS = 4
OVER_MODELS, RANGE = (
    "95 % interval over models",
    "range of the routes",
)  # what the ends of an interval are
OVER_BASES = (
    "95 % interval over pretrained models"  # each left out with all of its copies
)
OVER_COPIES = "95 % interval over fine-tunings of one pretrained model"
Kinds = Mapping[
    str, str
]  # model -> what it is of, such as its group, or the model that it was fine-tuned from


def over_pairs(
    rows: Sequence[Row],
    groups: Mapping[str, Sequence[str]] | None = None,
    quantities: Sequence[str] = ("penalty", "score_penalty"),
    by: Sequence[str] = ("method", "role", "site_x", "site_y"),
    bases: Kinds | None = None,
) -> list[Row]:
    """Means over the routes of each group, for every method and site pair (Brown et al. 2023, Figure 2).

    Routes share models, so they are not independent: the unit is the model. The interval is a jackknife: leave out
    one model at a time, with every route from it and into it, and take Student's t with one degree of freedom fewer
    than there are models. Between two groups, each gives an error of its own, with its own t, and the squares add
    (Banerjee 1960). For normal effects of source, target and pair, the interval holds the truth in 95 to 99 % of
    samples of 4 to 10 models. Where models differ, resampling them with replacement gives 77 to 88 %, and treating
    routes as independent 35 to 75 %. Copies of one pretraining are no independent models: see `independent_units`.

    The interval says what other models of the same kind would give on these texts; how much depends on the texts is
    the interval of each row. With fewer than four models in a group, the ends are the smallest and the largest of the
    routes, and `interval` says so.

    Args:
        rows: rows with model_x, model_y, `by` and `quantities`. Rows without a site are skipped.
        groups: name -> models; routes from group a into group b then form "a-to-b". By default all routes between
            different models are one group. Routes from a model into itself are always "same model".
        quantities: what to average.
        by: columns whose values are averaged separately.
        bases: model -> the pretrained model that it is a copy of; one that is not named is of its own.

    Returns:
        One row for each group and value of `by`: group, `by`, n_models, n_routes, interval, and each quantity with its
        _low and _high; None where a route lacks it, as after an overflow.

    Raises:
        ValueError: see `check_groups`.
    """
    sited = [row for row in rows if row["site_x"] is not None]
    kinds = check_groups(
        groups, (row[f"model_{side}"] for row in sited for side in "xy")
    )
    by_place: dict[tuple[Any, ...], list[Row]] = {}
    for row in sited:
        x, y = row["model_x"], row["model_y"]
        different = f"{kinds[x]}-to-{kinds[y]}" if kinds[x] else "different models"
        group = "same model" if x == y else different
        by_place.setdefault((group, *(row[name] for name in by)), []).append(row)
    summaries = {
        place: _summary(some, kinds, quantities, bases)
        for place, some in by_place.items()
    }
    return [
        dict(zip(("group", *by), place, strict=True)) | summary
        for place, summary in summaries.items()
    ]


def check_groups(
    groups: Mapping[str, Sequence[str]] | None, models: Iterable[str]
) -> dict[str, str]:
    """Return the group of each model; "" for all if there are no groups.

    Raises:
        ValueError: a model is in two groups or in none, or a group names a model that is not among `models`.
    """
    present = list(dict.fromkeys(models))
    if groups is None:
        return dict.fromkeys(present, "")
    members = [model for group in groups.values() for model in group]
    twice = sorted({model for model in members if members.count(model) > 1})
    absent = sorted(set(members) - set(present))
    missing = [model for model in present if model not in members]
    for what, wrong in (
        ("in one group", twice),
        ("among the models that were stitched", absent),
    ):
        if wrong:
            raise UserError(
                f"Expected every model of `groups` once and {what}, but got {', '.join(wrong)}."
            )
    if missing:
        raise UserError(
            f"Expected every model in one of `groups`, but {', '.join(missing)} is in none. Name a group for it, or "
            "leave `groups` out."
        )
    return {model: name for name, group in groups.items() for model in group}


def _summary(
    rows: list[Row], kinds: Kinds, quantities: Sequence[str], bases: Kinds | None
) -> Row:
    numbers = [
        [math.nan if row[name] is None else row[name] for row in rows]
        for name in quantities
    ]
    values = torch.tensor(numbers, dtype=torch.float64)
    ends = interval_over_models(
        values, [(row["model_x"], row["model_y"]) for row in rows], kinds, bases
    )
    low, high, interval = (
        (values.amin(-1), values.amax(-1), RANGE) if ends is None else ends
    )
    summary: Row = {
        "n_models": len({row[f"model_{side}"] for row in rows for side in "xy"}),
        "n_routes": len({(row["model_x"], row["model_y"]) for row in rows}),
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

    Copies of one pretraining share what it left in them, so a unit is a pretrained model with all of its copies. Where
    all models are copies of one, a unit is a model, and nothing is said about another pretraining. Where copies of one
    of several pretrained models are in different groups, these are not independent, and all units count as one group's.

    Args:
        models: that there are.
        kinds: model -> group.
        bases: model -> the pretrained model that it is a copy of; one that is not named is of its own.

    Returns:
        The units of each group, and what an interval over them is.
    """
    of = {model: (bases or {}).get(model, model) for model in models}
    alone, one = len(set(of.values())) == len(of), len(set(of.values())) == 1
    units: dict[str, dict[str, set[str]]] = {}
    apart = one or len({(base, kinds[model]) for model, base in of.items()}) == len(
        set(of.values())
    )
    for model, base in of.items():
        units.setdefault(kinds[model] if apart else "", {}).setdefault(
            model if one else base, set()
        ).add(model)
    interval = OVER_MODELS if alone else OVER_COPIES if one else OVER_BASES
    return [list(each.values()) for each in units.values()], interval


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
        kinds: model -> group; each group gives an error of its own.
        bases: as for `independent_units`, which are left out one at a time.

    Returns:
        Lower and upper ends, each (quantities,), and what they are. Or None: a group has fewer than four units, or
        every pair has one and the same.
    """
    mean, squares = values.mean(-1), torch.zeros(len(values), dtype=torch.float64)
    groups, interval = independent_units(
        dict.fromkeys(model for pair in pairs for model in pair), kinds, bases
    )
    for units in groups:
        without = torch.tensor(
            [[unit.isdisjoint(pair) for pair in pairs] for unit in units],
            dtype=torch.float64,
        )
        if len(units) < LEAST_MODELS or not bool(without.any(-1).all()):
            return None
        low, high = jackknife_interval(
            mean, (without / without.sum(-1, keepdim=True)) @ values.T
        )
        squares = squares + ((high - low) / 2).square()
    return mean - squares.sqrt(), mean + squares.sqrt(), interval
