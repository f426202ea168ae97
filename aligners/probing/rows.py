"""Rows of the report on probes: what each has, and intervals over sentences and seeds."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from aligners.injection.scoring.scores import percentile_interval, resampled_counts
from aligners.probing.arms import Arm

__all__ = ["COLUMNS", "Row", "draws", "parameters_of", "pooled_ratio", "row_of", "score_columns"]

Row = dict[str, Any]

COLUMNS = (
    *("model", "task", "probe", "source", "site", "rank", "parameters"),
    *("score", "score_low", "score_high", "score_seeds_low", "score_seeds_high"),
    *("control", "selectivity", "selectivity_low", "selectivity_high"),
    *("accuracy", "uuas", "uuas_low", "uuas_high", "root_accuracy", "root_accuracy_low", "root_accuracy_high"),
    *("centre_of_gravity", "n_sentences", "n_targets", "n_unknown"),
)


def row_of(source: str, arm: Arm | None = None, **known: Any) -> Row:
    """A row with all `COLUMNS`; None where nothing is known, or no finite number.

    Args:
        source: the model, its untrained twin, or a baseline.
        arm: that was asked.
        known: further columns.
    """
    own = {"source": source, "site": arm.layer if arm else None, "rank": arm.rank if arm else None, **known}
    unknown = set(own) - set(COLUMNS)
    if unknown:
        raise KeyError(f"no columns of the report: {sorted(unknown)}")
    return {column: _plain(own.get(column)) for column in COLUMNS}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def draws(sentences: int, seed: int) -> Tensor:
    """How often each sentence is drawn in each resample, (R, B): the same for all that is compared."""
    return resampled_counts(sentences, seed)


def score_columns(name: str, value: Tensor, resampled: Tensor, by_seed: Tensor | None = None) -> dict[str, Tensor]:
    """A score with its 95 % interval over sentences and, if there are several seeds, its range over them.

    Args:
        name: of the column.
        value: the score.
        resampled: (R,) in the resamples.
        by_seed: (S,).
    """
    low, high = percentile_interval(resampled)
    found = {name: value, f"{name}_low": low, f"{name}_high": high}
    if by_seed is not None:
        found |= {f"{name}_seeds_low": by_seed.min(), f"{name}_seeds_high": by_seed.max()}
    return found


def parameters_of(parameters: Any, arms: int) -> int:
    """Parameters of one arm, all of which have the arms on their first axis."""
    return sum(parameter.numel() for parameter in parameters) // arms


def pooled_ratio(numerator: Tensor, denominator: Tensor, weights: Tensor) -> Tensor:
    """A ratio of sums over sentences, in each resample.

    Args:
        numerator: (A, B).
        denominator: (A, B), or (B,).
        weights: (R, B).

    Returns:
        (A, R)
    """
    return (numerator @ weights.T) / (torch.atleast_2d(denominator) @ weights.T)
